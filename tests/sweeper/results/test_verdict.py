"""Three verdicts on a baseline: slower, not slower, and that it cannot be told."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.coverage import BASELINE_CASES, measure_verdicts
from sweeper.metrics.intervals import Interval
from sweeper.results.comparison import compare_values, describe_more_runs, judge, measure_ratio
from sweeper.results.runs import Gate, Verdict

GATE = Gate(threshold=0.02, between_runs=0.02)


def value(speed: float, spread: float = 0.005) -> Interval:
    return Interval(speed, speed * (1 - spread), speed * (1 + spread))


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        (value(100), value(110), Verdict.NOT_SLOWER),
        (value(100), value(100), Verdict.CANNOT_BE_TOLD),  # a loss of 3% is not excluded
        (value(100), value(80), Verdict.SLOWER),
        (value(100), value(97), Verdict.CANNOT_BE_TOLD),  # runs may differ by as much
        (Interval(0.188, 0.12, 0.21), Interval(0.1485, 0.10, 0.20), Verdict.CANNOT_BE_TOLD),
        (value(100), Interval(50), Verdict.CANNOT_BE_TOLD),  # fewer than 5 steps
        (value(100, 0.1), value(100, 0.1), Verdict.CANNOT_BE_TOLD),  # equal, but within wide intervals
    ],
)
def test_a_verdict_follows_from_both_intervals(before: Interval, after: Interval, verdict: Verdict) -> None:
    assert judge(before, after, GATE).verdict is verdict


def test_runs_that_are_known_to_differ_little_make_a_sharper_gate() -> None:
    sharp = Gate(0.02, between_runs=0.002)
    assert judge(value(100), value(97), sharp).verdict is Verdict.SLOWER
    assert judge(value(100), value(100), sharp).verdict is Verdict.NOT_SLOWER


def test_what_cannot_be_told_names_how_many_more_runs_tell() -> None:
    few = judge(value(100), value(98.5), Gate(between_runs=0.005))
    assert describe_more_runs(few) == "5 more runs needed" and describe_more_runs(judge(value(1), value(2), GATE)) == ""
    assert describe_more_runs(judge(value(100), value(99), GATE)) == "5 more runs and 5 more of the earlier work needed"


@pytest.mark.parametrize("case", BASELINE_CASES)
def test_equal_sweeps_are_seldom_called_slower(case: str) -> None:
    assert measure_verdicts(case, loss=0.0, simulations=300, seed=0)[Verdict.SLOWER] <= 1.0


def test_a_clear_loss_is_called_slower() -> None:
    assert measure_verdicts("10 steps of 1%", loss=0.10, simulations=200, seed=0)[Verdict.SLOWER] >= 90
    assert measure_verdicts("2 steps of 1%, 1% between runs", 0.10, 50, 0)[Verdict.CANNOT_BE_TOLD] == 100


@given(*[st.floats(1, 1e6)] * 2, *[st.floats(1e-6, 0.5)] * 2)
def test_a_ratio_is_stated_only_where_its_interval_excludes_one(
    first: float, second: float, first_spread: float, second_spread: float
) -> None:
    one, other = value(first, first_spread), value(second, second_spread)
    ratio = measure_ratio(one, other)
    assert ratio is not None
    text = compare_values(one, other, "A", "B")
    assert ("times as fast" in text) == (not ratio.low <= 1 <= ratio.high)
    assert ("cannot be told apart" in text) == (ratio.low <= 1 <= ratio.high)
    swapped = measure_ratio(other, one)
    assert swapped is not None and math.isclose(swapped.low * ratio.high, 1)
    assert "cannot be told without both 95% intervals" in compare_values(Interval(first), other, "A", "B")
