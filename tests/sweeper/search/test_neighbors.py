"""Trials that are far slower than their neighbors in the space."""

import time
from dataclasses import replace

import pytest

from sweeper.common.trials import Remeasurement, Retry, TrialRecord, TrialStatus
from sweeper.search.neighbors import Neighbors, describe_stall
from tests.conftest import Workspace
from tests.support.factories import trial_record

RATES = {256: 0.13, 320: 0.14, 384: 0.12}


def records_of(rates: dict[int, float], **changes: object) -> dict[int, TrialRecord]:
    return {
        number: trial_record(number, {"m": m, "dtype": "fp32"}, metrics={"tflops": rate}, **changes)
        for number, (m, rate) in enumerate(rates.items())
    }


def stall(rate: float, records: dict[int, TrialRecord], m: int = 300, dtype: str = "fp32") -> str:
    return describe_stall(
        trial_record(9, {"m": m, "dtype": dtype}, metrics={"tflops": rate}), records, "tflops", "maximize"
    )


def test_a_rate_far_below_all_neighbors_is_a_stall() -> None:
    assert stall(0.0042, records_of(RATES)) == "its 3 nearest neighbors are 29 to 33 times as fast"
    assert not stall(0.03, records_of(RATES)) and not stall(0.5, records_of(RATES))


def test_a_time_far_above_all_neighbors_is_a_stall() -> None:
    records = {n: trial_record(n, {"m": m}, metrics={"step_time_ms": 1.0}) for n, m in enumerate(RATES)}
    slow = trial_record(9, {"m": 300}, metrics={"step_time_ms": 80.0})
    assert describe_stall(slow, records, "step_time_ms", "minimize")
    assert not describe_stall(records[0], {9: slow, **records}, "step_time_ms", "minimize")


@pytest.mark.parametrize(("m", "dtype"), [(5000, "fp32"), (300, "bf16")])
def test_distant_shapes_and_other_types_are_no_neighbors(m: int, dtype: str) -> None:
    assert not stall(0.0042, records_of(RATES), m, dtype)


def test_trials_of_the_same_work_are_neighbors_whatever_else_differs() -> None:
    work = {"model": "llama_tiny"}
    layouts = {n: trial_record(n, {"layout": str(n)}, metrics={"tokens_per_s": 5000.0}, work=work) for n in range(3)}
    slow = trial_record(3, {"layout": "3"}, metrics={"tokens_per_s": 200.0}, work=work)
    assert describe_stall(slow, layouts, "tokens_per_s", "maximize") == "its 3 nearest neighbors are 25 times as fast"
    assert not describe_stall(replace(slow, work={"model": "other"}), layouts, "tokens_per_s", "maximize")


def test_many_trials_are_compared_in_seconds() -> None:
    """A hundred thousand took minutes."""
    records = {
        n: trial_record(n, {"m": 256 + n % 97, "n": 512 + n % 89, "dtype": "fp32"}, metrics={"tflops": 0.1})
        for n in range(2000)
    }
    neighbors, started_s = Neighbors(records, "tflops"), time.process_time()
    assert not any(describe_stall(record, records, "tflops", "maximize", neighbors) for record in records.values())
    assert time.process_time() - started_s < 1.5  # about 0.3


@pytest.mark.parametrize(("seconds", "is_stalled"), [(2.2, False), (9.0, True)])
def test_a_point_that_is_slow_in_both_of_its_measurements_is_slow(seconds: float, is_stalled: bool) -> None:
    first = trial_record(8, {"m": 300, "dtype": "fp32"}, measurements=[{"step_times_s": [2.0]}])
    second = replace(first, number=9, metrics={"tflops": 0.0042}, retry=Retry(8))
    second = replace(second, measurements=[{"step_times_s": [seconds]}])
    assert bool(describe_stall(second, {**records_of(RATES), 8: first}, "tflops", "maximize")) is is_stalled


def test_one_fast_neighbor_or_one_slow_one_decides_nothing() -> None:
    assert not stall(0.0042, records_of({256: 0.13}))
    assert not stall(0.0042, records_of({**RATES, 310: 0.005}))


def test_trials_without_a_result_and_rounds_of_the_finals_are_no_neighbors() -> None:
    assert not stall(0.0042, records_of(RATES, status=TrialStatus.FAILED))
    assert not stall(0.0042, records_of(RATES, remeasurement=Remeasurement(0, 0, (0,))))


@pytest.mark.soak
def test_a_stalled_trial_is_measured_again_at_the_end(workspace: Workspace) -> None:
    program = workspace.path / "train.sh"
    # The sixth start of the program is 90 times as slow as the others.
    program.write_text(
        f"echo >> {workspace.path}/starts\n[ $(wc -l < {workspace.path}/starts) = 6 ] && s=9 || s=0.1\n"
        "for i in 1 2; do echo step $s; done\n"
    )
    arguments = ["workload=command", f"command.run=[sh,{program},'{{x}}']", "command.log={step_time_s: 'step (.*)'}"]
    arguments += ["command.warmup=0", "command.steps=2", "space.x=range(16,24)", "search=grid", "finals.top=0"]
    result = workspace.run(*arguments, "workload.objective=step_time_ms", "workload.direction=minimize")
    assert result.code == 0 and "again    trials 5, which other processes disturbed" in result.err
    runs = workspace.runs("trial")
    assert {run.data.metrics.get("step_time_ms") for run in runs} == {100.0, None}
    attempts = [run.data.tags for run in runs if run.data.tags["outcome"] == "inconclusive"]
    assert [tags["reason"] for tags in attempts] == ["its 3 nearest neighbors are 90 times as fast"]
