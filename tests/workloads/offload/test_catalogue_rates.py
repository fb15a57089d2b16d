"""Plans of memory budgets by the catalogue's rates, compared with what an H200 measured."""

import csv

import pytest
import torch

from sweeper.preflight.clusters import build_cluster
from tests.conftest import REPOSITORY, CommandResult
from workloads.api.contract import Machine
from workloads.offload import Offload, OffloadParameters
from workloads.offload.catalogue_rates import CHUNK_TOKENS, model_sizes
from workloads.offload.device_rates import TIMED_CHUNK_TOKENS
from workloads.offload.optimizer import Precision

CELLS = REPOSITORY / "benchmarks/results/offload_h200_cells.csv"
SHOWN = ("model", "sequence_length", "device_gib", "host_gib")


def test_experts_are_planned_on_paper_with_what_only_they_need() -> None:
    """The state of Qwen3 30B is 114 GiB: it fits into 76 and 112 GiB, and not into 76 and 40."""
    cluster = build_cluster("h100", None, 1)
    machine = Machine("gpu", "sm90", 1, 1, cluster.device.memory_gib, cluster)
    constants = {"model": "qwen3_30b_a3b", "sequence_length": 4096, "sequences_per_step": 32, "device_gib": 76.0}
    constants |= {"optimizer_states": "int8"}
    too_small, enough = Offload().list_candidates({"host_gib": [40.0, 112.0]}, constants, machine)
    assert too_small.estimate.unsupported_reason.startswith("too small: at least 34.4 GiB more needed (device 68.4, ")
    measured = 15_236  # benchmarks/results/experts_h100.md
    assert enough.estimate.metrics["tokens_per_s"] == pytest.approx(measured, rel=0.06)


@pytest.mark.parametrize(
    ("hardware", "model", "gpus", "device_gib", "host_gib", "expected"),
    [
        ("h200", "llama3_70b", 2, 132, 240, "sharded"),
        ("h100", "llama3_70b", 2, 74, 240, "too small: at least 28.9 GiB more needed on each of 2 GPUs"),
        ("h200", "llama3_70b", 16, 132, 240, "offload trains on the GPUs of one host"),
        ("h100", "qwen2_5_32b", 1, 74, 120, "too small: at least 4.93 GiB more needed"),
    ],
)
def test_a_plan_says_how_a_large_model_is_distributed_or_by_how_much_it_does_not_fit(
    hardware: str, model: str, gpus: int, device_gib: float, host_gib: float, expected: str
) -> None:
    cluster = build_cluster(hardware, None, gpus)
    machine = Machine("gpu", "sm90", gpus, min(gpus, 8), cluster.device.memory_gib, cluster)
    constants = {"model": model, "optimizer_states": "int8", "device_gib": device_gib, "host_gib": host_gib}
    (candidate,) = Offload().list_candidates({}, constants, machine)
    estimate = candidate.estimate
    assert (estimate.unsupported_reason or estimate.description.split()[-1]).startswith(expected)


def test_one_gpu_has_nothing_to_divide_a_model_among() -> None:
    cluster = build_cluster("h100", None, 1)
    machine = Machine("gpu", "sm90", 1, 1, cluster.device.memory_gib, cluster)
    constants = {"model": "llama3_8b", "distribution": "sharded", "device_gib": 72, "host_gib": 60}
    (candidate,) = Offload().list_candidates({}, constants, machine)
    assert candidate.estimate.unsupported_reason.endswith("set gpus=2 or more, or distribution=null")


@pytest.mark.parametrize("number", [1, 6, 9])
def test_the_estimated_speed_is_within_the_band_of_the_plan(number: int) -> None:
    rows = [row for row in csv.DictReader(CELLS.open()) if row["measured_tokens_per_s"]]
    cell = rows[number]
    cluster = build_cluster("h200", None, 1)
    machine = Machine("gpu", "sm90", 1, 1, cluster.device.memory_gib, cluster)
    point = {name: cell[name] if name == "model" else float(cell[name]) for name in SHOWN}
    point["sequence_length"] = int(cell["sequence_length"])
    constants = {"sequences_per_step": int(float(cell["measured_sequences_per_step"]))}
    (candidate,) = Offload().list_candidates({name: [value] for name, value in point.items()}, constants, machine)
    measured = float(cell["measured_tokens_per_s"])
    assert candidate.estimate.metrics["tokens_per_s"] == pytest.approx(measured, rel=0.15)
    assert candidate.estimate.metrics["memory_gib"] <= float(cell["device_gib"])


@pytest.mark.parametrize("states", [None, "int8"])
@pytest.mark.parametrize("masters", ["none", "fp32"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_the_planned_states_are_those_of_the_engine(dtype: str, masters: str, states: str | None) -> None:
    parameters = OffloadParameters(8, 8, dtype=dtype, master_weights=masters, optimizer_states=states)  # type: ignore[arg-type]
    engine = Precision(
        {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype],
        master_weights=masters == "fp32" and dtype != "fp32",
        optimizer_states=states,  # type: ignore[arg-type]
    )
    state_bytes = sum(count * dtype.itemsize for count, dtype in engine.list_state_vectors(256))
    assert model_sizes(parameters).state_bytes_per_parameter == state_bytes / 256
    assert TIMED_CHUNK_TOKENS["cuda"] == CHUNK_TOKENS


def test_a_plan_shows_the_speed_memory_and_duration_of_each_budget(run_cli: object) -> None:
    result: CommandResult = run_cli("workload=llama8b", "hardware=h100", "space.host_gib=60,100", "plan=true")
    assert result.code == 0, result.err
    for text in ("band     15%", "host GiB", "s a trial", "device_gib=78 host_gib=60", "the GPU has 79"):
        assert text in result.out, result.out
    assert "/sweeps/llama8b-h100-" in result.out
