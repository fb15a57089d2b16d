"""The rates that sweeps leave behind, and what training is compared with."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from sweeper.metrics.derivation import derive
from sweeper.pages import per_gpu
from sweeper.pages.sweep_results import Results
from sweeper.preflight import ceilings
from sweeper.preflight.ceilings import MatmulCeiling
from tests.conftest import CommandResult, Workspace
from tests.support.factories import finals_record as record
from workloads.api.contract import Measurement

H200 = MatmulCeiling(
    device="NVIDIA H200",
    dtype="bf16",
    matrix_dtype="bf16",
    statistic="median_cold",
    tflops=780.0,
    tflops_low=770.0,
    tflops_high=790.0,
    tflops_sustained=664.0,
    shape="8192x8192x8192",
    layout="nt",
    backend="torch",
    rounds=5,
    repeats=30,
    torch="2.11",
    date="2026-11-21",
)


def test_the_highest_rate_of_its_kind_is_kept(tmp_path: Path) -> None:
    for rate in (H200, replace(H200, tflops=700.0), replace(H200, tflops=790.0)):
        ceilings.keep(tmp_path, [rate])
    ceilings.keep(tmp_path, [replace(H200, tflops=100.0, statistic="fastest_warm")])
    assert sorted(rate.tflops for rate in ceilings.read(tmp_path)) == [100.0, 790.0]


def test_a_new_single_trial_does_not_replace_the_winner_of_the_finals(tmp_path: Path) -> None:
    ceilings.keep(tmp_path, [replace(H200, tflops=818.0, rounds=0)])
    ceilings.keep(tmp_path, [H200])
    ceilings.keep(tmp_path, [replace(H200, tflops=820.0, rounds=0)])
    assert [rate.tflops for rate in ceilings.read(tmp_path)] == [780.0]


def test_a_broken_file_is_reported_before_anything_starts(
    tmp_path: Path, run_cli: Callable[..., CommandResult]
) -> None:
    tmp_path.joinpath("matmul_ceilings.json").write_text("")
    result = run_cli("workload=probe", "budget.trials=1")
    assert (
        result.code == 2
        and "matmul_ceilings.json: cannot be read" in result.err
        and len(result.err.strip().splitlines()) == 1
    )


def test_training_is_compared_with_the_best_median_of_its_type_on_its_gpu() -> None:
    kept = [
        H200,
        replace(H200, tflops=820.0, statistic="fastest_warm"),
        replace(H200, dtype="fp8_rowwise", matrix_dtype="fp8", tflops=1400.0),
        replace(H200, dtype="fp8_tensorwise", matrix_dtype="fp8", tflops=1430.0),
        replace(H200, device="NVIDIA B200", tflops=1700.0),
    ]
    assert ceilings.achieved_tflops(kept, "NVIDIA H200") == {"bf16": 780.0, "fp8": 1430.0}


def test_training_reports_two_utilizations_and_a_product_one() -> None:
    trained = Measurement({}, (1.0,), flops_per_step=390e12, tokens_per_step=10, matrix_dtype="bf16")
    both = derive([trained], {"bf16": 975.0}, {"bf16": 780.0})
    assert both["mfu"] == pytest.approx(0.4) and both["mamf_utilization"] == pytest.approx(0.5)
    assert "mamf_utilization" not in derive([trained], {"bf16": 975.0})
    assert "mamf_utilization" not in derive([replace(trained, tokens_per_step=0)], {}, {"bf16": 780.0})


@pytest.mark.soak
def test_a_search_records_a_rate_of_each_format(workspace: Workspace) -> None:
    arguments = [
        "space.m=64,128",
        "space.n=64",
        "space.k=64",
        "space.statistic=median_warm,fastest_warm",
        "search=grid",
    ]
    result = workspace.run(*arguments, "finals.top=1", "finals.rounds=2")
    assert result.code == 0, result.err
    assert "no verdict: only trial" in result.out
    assert {rate.statistic for rate in ceilings.read(workspace.path)} == {"median_warm", "fastest_warm"}
    assert sorted(rate.rounds for rate in ceilings.read(workspace.path)) == [0, 2]


def test_another_objective_records_no_rate(tmp_path: Path) -> None:
    """A final result in milliseconds is not a rate."""
    for objective, direction in (("step_time_ms", "minimize"), ("mfu", "maximize")):
        workload = SimpleNamespace(name="matmul", objective=objective, direction=direction)
        plan = SimpleNamespace(config=SimpleNamespace(workload=workload), directory=tmp_path)
        Results(plan, {}, [], [], [], [record(1, 1.0)], [], []).keep_ceilings()  # type: ignore[arg-type]
    assert ceilings.read(tmp_path) == []


def test_gpus_of_different_gangs_are_not_compared() -> None:
    machine_info = [{"host": "n0", "gpu_uuid": name} for name in "abcd"]
    ranks = [
        {"independent": True, "statistic": "median", "flops_per_step": 1.0, "step_times_s": [1.0], "machine_info": f}
        for f in machine_info
    ]
    trials = [replace(record(1, 1.0), measurements=ranks[:2]), replace(record(2, 1.0), measurements=ranks[2:])]
    assert per_gpu.per_gpu_results(trials) == []


def test_each_gpu_is_compared_with_the_others_of_its_trials() -> None:
    def rank(name: str, time_s: float) -> dict[str, object]:
        machine_info = {"host": "n0", "gpu_uuid": name}
        return {
            "independent": True,
            "statistic": "median",
            "flops_per_step": 1e12,
            "step_times_s": [time_s] * 3,
            "machine_info": machine_info,
        }

    trials = [
        replace(record(n, 1.0), measurements=[rank("a", 1.0 * s), rank("b", 1.1 * s), rank("c", 0.9 * s)])
        for n, s in enumerate((1.0, 2.0, 3.0))
    ]
    results = per_gpu.per_gpu_results([*trials, record(9, 1.0)])
    assert [member.gpu for member in results] == ["b", "a", "c"]
    assert results[0].relative == pytest.approx(1 / 1.1) and results[0].trials == 3
    assert "22.2% between the fastest and the slowest: n0 b at 0.909" in per_gpu.describe(results)
