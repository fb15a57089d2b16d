"""The layouts of a command, and the presets of trainers that run where these are installed."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import REPOSITORY, Workspace
from tests.support.planner_estimates import cluster, job
from workloads.api.contract import Estimate, Machine, Rank
from workloads.api.registry import load
from workloads.command.invocation import build_invocation
from workloads.estimator.step import estimate_job


def test_only_valid_layouts_of_a_command_with_layout_are_tried() -> None:
    loaded: Any = load("command")
    layout = {"tp": "{tensor}", "pp": "{pipeline}"}
    settings = {"run": ["x"], "layout": layout, "global_batch": "64", "sequence_length": "8192", "model": "llama3_8b"}
    command = loaded.with_settings(loaded.Settings(**settings))
    machine = Machine("gpu", "sm90", 8, 8, 131.0)

    def unsupported_reason(tensor: int, pipeline: int, machine: Machine = machine) -> str:
        return str(command.estimate(command.Parameters(tensor=tensor, pipeline=pipeline), machine).unsupported_reason)

    assert unsupported_reason(2, 1) == unsupported_reason(4, 2) == ""
    assert "= 6 ranks, but there are 8" in unsupported_reason(3, 2) and "16 ranks" in unsupported_reason(16, 1)
    assert "tp=0, it has to be a whole number" in unsupported_reason(0, 1)
    three_ranks = Machine("gpu", "sm90", 3, 8, 131.0)
    assert "pp 3 does not divide 32 layers" in unsupported_reason(1, 3, three_ranks)


def test_what_fills_a_pipeline_needs_a_micro_batch() -> None:
    loaded: Any = load("command")
    with pytest.raises(ValueError, match=r"{pipeline_batch}: needs layout\.micro_batch"):
        loaded.Settings(run=["x", "--batch={pipeline_batch}"])


def estimate(trainer: str, memory_gib: float = 600.0, **values: Any) -> Estimate:
    """Return the estimate of a layout on eight H100s, whose keys are those of `command.layout`."""
    loaded: Any = load("command")
    settings = {"run": ["x"], "global_batch": "64", "sequence_length": "8192", "model": "llama3_8b", "dtype": "{dtype}"}
    layout = {name: f"{{{name}}}" for name in values if name != "dtype"}
    command = loaded.with_settings(loaded.Settings(**settings, layout=layout, trainer=trainer))
    machine = Machine("gpu", "sm90", 8, 8, memory_gib, cluster=cluster(8))
    return command.estimate(command.Parameters(**{"dtype": "bf16", **values}), machine)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("trainer", "checkpointing", "expected", "sharding"),
    [
        ("megatron", "selective", {"checkpointing": "core_attention"}, "zero1"),
        ("torchtitan", "selective", {"checkpointing": "full", "checkpointed_layers": 16}, "fsdp2"),
        ("primus", "full", {"checkpointing": "full"}, "zero1"),
    ],
)
def test_a_layout_is_estimated_as_its_trainer_runs_it(
    trainer: str, checkpointing: str, expected: dict[str, Any], sharding: str
) -> None:
    found = estimate(trainer, tp=2, checkpointing=checkpointing, compiled=True)
    planned = job(trainer=trainer, dp_shard=4, tp=2, global_batch=64, sharding=sharding, **expected)
    planned_estimate = estimate_job(planned, cluster(8))
    assert found.metrics["tokens_per_s"] == pytest.approx(planned_estimate.tokens / planned_estimate.step.total_s)
    assert found.metrics["memory_gib"] == pytest.approx(planned_estimate.memory.needed_gib)
    assert all(f"{name}={value}" in found.description for name, value in expected.items())
    unnamed = estimate("", tp=2, checkpointing="none", compiled=True)
    assert unnamed.metrics["tokens_per_s"] != found.metrics["tokens_per_s"] and "memory_gib" not in unnamed.metrics


def test_the_data_type_of_a_command_counts_where_the_planner_has_its_recipe() -> None:
    speeds = [estimate("megatron", tp=1, dtype=name).metrics["tokens_per_s"] for name in ("bf16", "fp8_hybrid", "odd")]
    assert speeds[1] > speeds[0] == speeds[2]


def test_a_layout_that_surely_does_not_fit_or_that_the_trainer_does_not_run_is_excluded() -> None:
    needed_gib = estimate("megatron", tp=1).metrics["memory_gib"]
    assert estimate("megatron", 0.95 * needed_gib, tp=1).unsupported_reason == ""  # within the band of estimates
    too_large = estimate("megatron", 0.8 * needed_gib, tp=1)
    assert too_large.rule == "the layout fits into memory" and "at least" in too_large.unsupported_reason
    assert "megatron does not run it" in estimate("megatron", tp=1, checkpointing="per_op").unsupported_reason
    assert "state=int4: megatron does not run it" in estimate("megatron", tp=1, state="int4").unsupported_reason


def test_torchtitan_accepts_the_configuration_of_its_preset(workspace: Workspace, tmp_path: Path) -> None:
    """Only its parser runs, since training needs a GPU. Skipped where torchtitan or triton is not installed."""
    pytest.importorskip("triton")
    pytest.importorskip("torchtitan", exc_type=ImportError)
    preset = yaml.safe_load((REPOSITORY / "conf/workload/torchtitan.yaml").read_text())
    values = preset["space"] | {"tp": 2, "pp": 1, "micro_batch": 2, "checkpointing": "full"}
    loaded: Any = load("command")
    rank = Rank(world_size=8, ranks_per_node=8)
    files = build_invocation(loaded.Settings(**preset["command"]), values, rank, "o").files
    (tmp_path / "config.toml").write_text(files["config.toml"])
    program = (
        "import sys; from torchtitan.config import ConfigManager as M; c = M().parse_args(sys.argv[1:]); "
        "print(c.parallelism.tensor_parallel_degree, c.training.seq_len, c.activation_checkpoint.mode, "
        "c.model.flavor, *c.model.converters)"
    )
    fp8 = preset["command"]["options"]["precision"]["fp8_tensorwise"]
    command = [sys.executable, "-c", program, f"--job.config_file={tmp_path}/config.toml", *fp8]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.stdout.splitlines()[-1:] == ["2 8192 full 8B quantize.linear.float8"], result.stderr[-2000:]


@pytest.mark.gpu
def test_the_debug_model_of_torchtitan_trains(workspace: Workspace) -> None:
    pytest.importorskip("torchtitan", exc_type=ImportError)
    from benchmarks.trainers import make_text

    make_text(workspace.path, vocabulary=2000)
    arguments = [f"space.assets={workspace.path}/assets", f"space.dataset_path={workspace.path}/text"]
    arguments += ["space.micro_batch=2", "space.checkpointing=none", "gpus=1"]
    result = workspace.run("workload=torchtitan_debug", "search=grid", "progress=never", *arguments)
    assert result.code == 0, result.out + result.err
    (trial_run,) = workspace.runs("trial")
    assert trial_run.data.metrics["tokens_per_s"] > 0 and trial_run.data.metrics["steps"] == 10
