"""Trials of offloaded training: their budgets, their refusals, and what they read back."""

import gzip
import json
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pynvml
import pytest
import torch

from tests.conftest import CommandResult, Workspace
from tests.support.offload_plans import CPU
from workloads.api.contract import Infeasible, Machine, OutOfMemory, Rank, Scalar
from workloads.api.trial import run_trial
from workloads.models.model import MODELS
from workloads.offload import Offload, OffloadParameters, run
from workloads.offload.cost_model import DeviceRates, MemoryBudget, ModelSizes
from workloads.offload.device_rates import measure_device_rates
from workloads.offload.optimizer import Precision
from workloads.offload.plan import GIB
from workloads.offload.plan_search import Prediction, find_fastest_plan

TINY = {"model": "llama_tiny", "sequence_length": 32, "sequences_per_step": 4, "dtype": "fp32", "steps": 3}
ON_DEVICE = {"device_gib": 1.0, "host_gib": 0.0}


def test_a_trial_keeps_within_its_host_budget_and_its_loss_does_not_depend_on_the_plan() -> None:
    """On a CPU two plans compute the same numbers up to rounding, from tensors that are stored elsewhere."""
    on_device = run_trial("offload", {**TINY, **ON_DEVICE}, Rank())
    assert on_device.metrics["copied_gib_per_step"] == 0 and on_device.metrics["peak_host_gib"] == 0
    device_gib = find_min_device_gib(0.05)
    offloaded = run_trial("offload", {**TINY, "device_gib": device_gib, "host_gib": 0.05}, Rank())
    assert 0 < offloaded.metrics["peak_host_gib"] <= 0.05 and offloaded.metrics["copied_gib_per_step"] > 0
    assert offloaded.metrics["loss"] == pytest.approx(on_device.metrics["loss"], abs=1e-5)
    for share in ("copy_wait_share", "optimizer_share", "predicted_copy_wait_share"):
        assert 0 <= offloaded.metrics[share] <= 1
    assert offloaded.hardware_flops_per_step >= on_device.hardware_flops_per_step > on_device.flops_per_step


def test_a_warm_up_step_of_one_round_trains_on_that_round_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds, step, find = [], run.Engine.step, run.find_fastest_plan

    def find_two_rounds(*arguments: Any) -> Prediction:
        prediction = find(*arguments)
        two = {"sequences_per_chunk": 1, "segments_per_sequence": 1, "chunks_per_round": 2, "accumulation_rounds": 2}
        return replace(prediction, plan=replace(prediction.plan, **two))

    def note_rounds(engine: run.Engine, batch: torch.Tensor) -> torch.Tensor:
        rounds.append(len(batch))
        return step(engine, batch)

    monkeypatch.setattr(run, "find_fastest_plan", find_two_rounds)
    monkeypatch.setattr(run.Engine, "step", note_rounds)
    measurement = run_trial("offload", {**TINY, **ON_DEVICE, "warmup_rounds": 1}, Rank())
    assert rounds == [1, 2, 2, 2] and measurement.executed["warmup_rounds"] == 1
    assert len(measurement.step_times_s) == 3 and measurement.tokens_per_step == 4 * 32
    run_trial("offload", {**TINY, **ON_DEVICE, "warmup": 0, "warmup_rounds": 1}, Rank())  # is as requested


def test_the_processes_of_a_gang_keep_host_memory_beside_what_they_pin() -> None:
    """On a host with 247 GiB available two processes trained with 223 GiB pinned, and one was killed with 236."""
    run.check_host_memory(int(111.6 * GIB), 2, "cuda", 247 * GIB)
    with pytest.raises(Infeasible, match=r"pins 235\.7 GiB of host memory for 2 GPUs.* set host_gib to at most 234"):
        run.check_host_memory(int(117.86 * GIB), 2, "cuda", 248 * GIB)


def test_the_start_of_a_trial_is_divided_into_its_parts() -> None:
    measurement = run_trial("offload", {**TINY, **ON_DEVICE, "steps": 1}, Rank())
    parts = [part.rsplit(" ", 2)[:2] for part in str(measurement.machine_info["startup"]).split(", ")]
    assert [name for name, _ in parts] == ["rates", "plan", "host memory", "weights", "first step"]
    assert sum(float(seconds) for _, seconds in parts) == pytest.approx(measurement.metrics["startup_s"], abs=0.26)


def test_fp8_is_infeasible_where_no_product_or_kernel_takes_it() -> None:
    parameters = OffloadParameters(device_gib=1.0, host_gib=0.0, dtype="fp8_tensorwise", sequence_length=40)
    with pytest.raises(Infeasible, match=r"dtype=fp8_tensorwise is emulated on this device: sm80 lacks fp8"):
        run.select_precision(parameters, "sm80")
    with pytest.raises(Infeasible, match="not for AMD's GPUs: this block's casts are Triton kernels"):
        run.select_precision(parameters, "gfx942")
    with pytest.raises(Infeasible, match="sequence_length=40: dtype=fp8_tensorwise needs a multiple of 16"):
        run.select_precision(parameters, "sm90")
    assert run.select_precision(replace(parameters, sequence_length=48), "sm90").recipe == "fp8_tensorwise"
    in_blocks = replace(parameters, dtype="fp8_blockwise", sequence_length=192)
    with pytest.raises(Infeasible, match="sequence_length=192: dtype=fp8_blockwise needs a multiple of 128"):
        run.select_precision(in_blocks, "sm90")
    with pytest.raises(Infeasible, match="dtype=fp8_blockwise is emulated on this device: sm100 lacks 1x128"):
        run.select_precision(in_blocks, "sm100")
    with pytest.raises(Infeasible, match="PyTorch groups products with scales of rows on sm90 alone; set dtype=bf16"):
        run.select_precision(replace(parameters, model="olmoe_1b_7b", sequence_length=48), "sm100")
    assert run.select_precision(replace(in_blocks, sequence_length=256), "sm90").recipe == "fp8_blockwise"


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"imbalance": 2.0}, "imbalance=2: llama3_8b has no experts; set imbalance=null"),
        ({"model": "mixtral_8x7b", "imbalance": 5.0}, "imbalance=5: no expert has a token twice, so it is at most 4"),
        (
            {"model": "olmoe_1b_7b", "dtype": "fp8_blockwise"},
            "olmoe_1b_7b has experts, whose products have no scales of",
        ),
    ],
)
def test_what_experts_cannot_be_is_refused_in_a_line(values: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        OffloadParameters(device_gib=1.0, host_gib=0.0, **values)


@pytest.mark.parametrize(
    ("hardware", "dtype", "reason"),
    [
        ("a100", "fp8_tensorwise", "is emulated on this device: sm80 lacks fp8 matrix units"),
        ("mi300x", "fp8_tensorwise", "is not for AMD's GPUs"),
    ],
)
def test_a_data_type_that_the_device_lacks_is_refused_before_a_trial(
    run_cli: Callable[..., CommandResult], hardware: str, dtype: str, reason: str
) -> None:
    result = run_cli("workload=llama_tiny", f"hardware={hardware}", f"space.dtype={dtype}", "plan=true")
    assert result.code == 2 and f"space.dtype={dtype} {reason}" in result.err


def test_a_plan_names_a_data_type_that_the_device_does_not_train_in() -> None:
    parameters = OffloadParameters(device_gib=1.0, host_gib=0.0, dtype="fp8_blockwise", sequence_length=8192)
    for architecture, reason in {"sm90": "", "sm100": "infeasible: dtype=fp8_blockwise is emulated"}.items():
        preview = Offload().preview(parameters, Machine("gpu", architecture, 1, 1))
        assert preview.startswith(reason) and bool(preview) == bool(reason)


def test_what_ran_is_read_back_from_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial that trains in other types than requested does not report those of the request."""
    monkeypatch.setattr(run, "select_precision", lambda *_: Precision(torch.float32))
    parameters = OffloadParameters(
        device_gib=1.0, host_gib=0.0, **{**TINY, "dtype": "bf16", "master_weights": "none", "steps": 1}
    )
    measurement = run.measure(parameters, Rank())
    assert measurement.executed["dtype"] == "fp32" and measurement.executed["master_weights"] == "none"
    assert measurement.machine_info["type_of_optimizer_states"] == "fp32"
    assert measurement.executed["model"] == "llama_tiny" and measurement.executed["sequence_length"] == 32
    assert measurement.executed["sequences_per_step"] == 4 and measurement.executed["steps"] == 1


@pytest.mark.parametrize("failures", [0, 1, 2])
def test_a_plan_that_runs_out_of_memory_is_followed_by_one_smaller_plan(
    failures: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine fails as the allocator of a GPU makes it fail; a CPU has no allocator with a limit."""
    made, step, find = 0, run.Engine.step, run.find_fastest_plan
    budgets_gib: list[float] = []

    def fail_first(engine: run.Engine, tokens: torch.Tensor) -> torch.Tensor:
        nonlocal made
        made += 1
        if made <= failures:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. Of the allocated memory")
        return step(engine, tokens)

    def find_and_note(model: ModelSizes, length: int, sequences: int, budget: MemoryBudget, rates: DeviceRates) -> Any:
        budgets_gib.append(budget.device_gib)
        return find(model, length, sequences, budget, rates)

    monkeypatch.setattr(run.Engine, "step", fail_first)
    monkeypatch.setattr(run, "find_fastest_plan", find_and_note)
    parameters = {**TINY, "device_gib": 1.0, "host_gib": 0.0}
    if failures == 2:
        with pytest.raises(OutOfMemory, match=r"2\.00 GiB\. Of the allocated memory"):
            run_trial("offload", parameters, Rank())
    else:
        measurement = run_trial("offload", parameters, Rank())
        assert measurement.metrics.get("replanned_device_gib") == (0.95 if failures else None)
        assert ("2.00 GiB" in str(measurement.machine_info.get("out_of_memory"))) == bool(failures)
    assert budgets_gib == [1.0, 0.95][: 1 + (failures > 0)]


def find_min_device_gib(host_gib: float) -> float:
    """Return about the least device memory that the tiny model trains in."""
    rates = measure_device_rates("llama_tiny", 32, CPU, Precision(torch.float32))
    model = ModelSizes(MODELS["llama_tiny"], element_bytes=4, state_bytes_per_parameter=8)
    too_small, enough = 0.0, 1.0
    for _ in range(16):
        device_gib = (too_small + enough) / 2
        try:
            find_fastest_plan(model, 32, 4, MemoryBudget(device_gib, host_gib), rates)
            enough = device_gib
        except Infeasible:
            too_small = device_gib
    return 1.02 * enough


def test_a_trace_names_the_parts_of_a_step() -> None:
    measurement = run_trial("offload", {**TINY, **ON_DEVICE, "model": "qwen3_moe_tiny", "profile": True}, Rank())
    events = json.loads(gzip.decompress(measurement.files["trace.json.gz"]))["traceEvents"]
    names = {event.get("name") for event in events}
    assert {"layer 0 forward", "layer 1 backward", "layer 1 update", "head and loss"} <= names
    assert {"router", "permutation", "experts"} <= names
    shares = [measurement.metrics[f"{part}_share"] for part in ("router", "permutation", "experts")]
    assert min(shares) > 0 and sum(shares) < 1


@pytest.mark.gpu
def test_memory_as_the_driver_and_the_kernel_count_it_stays_within_both_budgets() -> None:
    """The driver counts the whole device and the kernel the whole process. Both hold more than the budgets cover, such
    as CUDA's context and libraries, so the memory of a trial of next to nothing is subtracted. A process of its own
    runs both trials: memory that earlier tests left in this one would count."""
    parameters = {"model": "llama3_1b", "sequence_length": 2048, "sequences_per_step": 32, "steps": 1}
    parameters |= {"device_gib": 9.0, "host_gib": 10.0}
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        device_before, host_before = process.submit(measure_peak_gib, {**TINY, **ON_DEVICE}).result()
        device_peak, host_peak = process.submit(measure_peak_gib, parameters).result()
    assert 4 < device_peak - device_before <= 9.2 and 4 < host_peak - host_before <= 10.5


def measure_peak_gib(parameters: dict[str, Scalar]) -> tuple[float, float]:
    """Return the most GiB that the device and this process use during a trial with `parameters`."""
    pynvml.nvmlInit()
    handle, done = pynvml.nvmlDeviceGetHandleByIndex(0), threading.Event()
    peak = [0.0, 0.0]

    def sample() -> None:
        while not done.wait(0.01):
            peak[0] = max(peak[0], pynvml.nvmlDeviceGetMemoryInfo(handle).used / GIB)
            peak[1] = max(peak[1], int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / GIB)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        run_trial("offload", parameters, Rank(device="cuda"))
    finally:
        done.set()
        thread.join()
    return peak[0], peak[1]


@pytest.mark.gpu
def test_on_a_gpu_the_loss_of_an_offloaded_run_follows_the_one_on_the_device() -> None:
    parameters = {"model": "llama3_1b", "sequence_length": 1024, "sequences_per_step": 32, "warmup": 0}
    budgets = {"device_gib": 60.0, "host_gib": 0.0}, {"device_gib": 8.0, "host_gib": 12.0}
    for steps in (1, 10, 20):
        losses = [
            run_trial("offload", {**parameters, **budget, "steps": steps}, Rank(device="cuda")).metrics["loss"]
            for budget in budgets
        ]
        assert losses[1] == pytest.approx(losses[0], rel=3e-3)


@pytest.mark.soak
def test_a_sweep_over_budgets_reports_which_fit_and_which_do_not(workspace: Workspace) -> None:
    overrides = ["workload=llama_tiny", "space.device_gib=0.0001,1", "space.host_gib=0", "search=grid", "hardware=cpu"]
    done = workspace.run(*overrides)
    assert "1 complete, 1 infeasible" in done.out and "GiB more needed" in done.out
    assert "speed" in done.out and "tokens/s" in done.out and "predicted" in done.out
