"""A plan of layouts from the command line, and what it refuses."""

import re
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from tests.conftest import CommandResult
from workloads.layouts.layout import DEGREES


def test_a_plan_shows_tried_and_excluded_points_and_the_projection(
    run_cli: Callable[..., CommandResult], tmp_path: Path
) -> None:
    result = run_cli("workload=parallel", "gpus=2", "plan=true", "projection.nodes=1,16", "price_per_hour=2.5")
    assert result.code == 0, result.err
    tried, excluded = (
        int(n.replace(",", "")) for n in re.findall(r"(?m)^([\d,]+) (?:valid|excluded) points", result.out)
    )
    assert 0 < tried < 100 and tried + excluded == 2**5 * 2 * 3 * 3 * 3 * 2
    assert "the degrees multiply to the number of ranks" in result.out
    assert "fixed    model=llama_tiny sequence_length=64" in result.out
    assert re.search(r"nodes +devices +sequences a step .*\n.*\n +1 +2 +8 ", result.out)
    assert re.search(r"(?m)^ +16 +32 +128 ", result.out)
    assert "dp_shard 2, micro-batch 4 x 1" in result.out and "of linear" in result.out and "assumptions:" in result.out
    table = pd.read_csv(next(tmp_path.glob("sweeps/*/plan.csv")))
    assert (
        table.points.sum() == tried + excluded
        and (table.unsupported_reason.isna().sum() == tried)
        and not list(tmp_path.glob("sweeps/*/study.journal"))
    )


def test_experts_are_divided_by_default_and_presets_values_can_be_typed(run_cli: Callable[..., CommandResult]) -> None:
    target = ("workload=parallel", "gpus=4", "hardware=h200", "plan=true", "space.tp=divisors(gpus)")
    experts = run_cli(*target, "model=qwen3_30b_a3b", "space.global_batch=multiple(gpus, 9)", "space.state=bf16")
    assert experts.code == 0, experts.err
    assert " tp, " in experts.out and " ep, " in experts.out and "global_batch=12" in experts.out
    assert "dp_shard 4 x ep 2" in experts.out
    dense = run_cli(*target)
    assert dense.code == 0 and " tp, " in dense.out and " ep" not in dense.out


def test_a_plan_can_be_made_for_gpus_that_this_machine_does_not_have(run_cli: Callable[..., CommandResult]) -> None:
    result = run_cli("workload=parallel", "model=llama3_70b", "gpus=16", "hardware=h200", "plan=true", "space.tp=8")
    assert result.code == 0, result.err
    assert "16 x h200, planned" in result.out and "the layout fits into memory" in result.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["gpus=2", "space.tp=2", "space.dp_shard=2"],
            "do not multiply to 2 ranks. Points are valid with space.tp=1 or space.dp_shard=1",
        ),
        ([*(f"space.{name}=1" for name in DEGREES), "space.micro_batch=3"], "not a multiple of micro-batch 3"),
        (
            ["gpus=8", "hardware=h200", "plan=true", "space.dtype=mxfp8"],
            "space.dtype=mxfp8 is emulated on this device: sm90 lacks units with a scale for each 32",
        ),
        (
            ["gpus=8", "hardware=mi355x", "plan=true", "space.dtype=mxfp8"],
            "space.dtype=mxfp8 is unsupported on this device: torchao's mxfp8 layer is for NVIDIA GPUs",
        ),
        (
            ["gpus=8", "hardware=mi355x", "plan=true", "space.dtype=nvfp4"],
            "space.dtype=nvfp4 is emulated on this device: gfx950 lacks fp4 matrix units of NVIDIA",
        ),
        (
            ["gpus=8", "hardware=mi300x", "plan=true", "space.block=manual", "space.dtype=fp8_tensorwise"],
            "dtype=fp8_tensorwise is not for AMD's GPUs: this block's casts are Triton kernels",
        ),
        *(
            (
                ["gpus=8", f"hardware={name}", "plan=true", "model=gpt_oss_20b"],
                "attention with sinks needs FlashAttention 4, for NVIDIA GPUs of compute capability 9.x or 10.x; this",
            )
            for name in ("mi300x", "a100")
        ),
        (["gpus=2", "hardware=h200"], "hardware=h200: not in the cluster"),
        (["gpus=2", "projection.nodes=2,x"], "projection.nodes=2,x: must be numbers of nodes"),
        (
            ["gpus=16", "hardware=h100", "plan=true", "projection.nodes=1,2"],
            "projection.nodes=1: copies of a trial of 16 GPUs fill multiples of 2 nodes of 8, such as",
        ),
        (["workload=matmul", "projection.nodes=2"], "projection.nodes: matmul cannot project to more nodes"),
        (["gpus=2", "space.learning_rate=interval(0.1,0.2)"], "every point is estimated before"),
    ],
)
def test_an_impossible_layout_is_refused_before_anything_starts(
    run_cli: Callable[..., CommandResult], arguments: list[str], message: str
) -> None:
    result = run_cli("workload=parallel", *arguments)
    assert result.code == 2 and message in result.err and len(result.err.splitlines()) <= 2
