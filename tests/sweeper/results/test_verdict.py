"""The verdicts on a baseline: faster, not slower, slower, inconclusive."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.coverage import BASELINE_CASES, measure_verdicts
from sweeper.metrics.intervals import Interval
from sweeper.results.comparison import describe_spread, judge
from sweeper.results.runs import Gate, Verdict

GATE = Gate(threshold=0.02, between_runs=0.02)


def value(speed: float, spread: float = 0.005) -> Interval:
    return Interval(speed, speed * (1 - spread), speed * (1 + spread))


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        (value(100), value(110), Verdict.FASTER),
        (value(100), value(100), Verdict.INCONCLUSIVE),  # a loss of 3% is not excluded
        (value(100), value(80), Verdict.SLOWER),
        (value(100), value(97), Verdict.INCONCLUSIVE),  # runs may differ by as much
        (Interval(0.188, 0.12, 0.21), Interval(0.1485, 0.10, 0.20), Verdict.INCONCLUSIVE),
        (value(100), Interval(50), Verdict.INCONCLUSIVE),  # fewer than 5 steps
        (value(100, 0.1), value(100, 0.1), Verdict.INCONCLUSIVE),  # equal, but within wide intervals
    ],
)
def test_a_verdict_follows_from_both_intervals(before: Interval, after: Interval, verdict: Verdict) -> None:
    assert judge([before], [after], GATE).verdict is verdict


def test_runs_that_are_known_to_differ_little_make_a_sharper_gate() -> None:
    sharp = Gate(0.02, between_runs=0.002)
    assert judge([value(100)], [value(97)], sharp).verdict is Verdict.SLOWER
    assert judge([value(100)], [value(100)], sharp).verdict is Verdict.NOT_SLOWER


def test_an_inconclusive_verdict_names_how_many_more_runs_are_needed() -> None:
    few = judge([value(100)], [value(98.5)], Gate(between_runs=0.005))
    assert describe_spread(few) == "0.5% between runs (assumed); 5 more runs needed"
    assert describe_spread(judge([value(1)], [value(2)], GATE)) == "2.0% between runs (assumed)"
    assert describe_spread(judge([value(100)], [value(99)], GATE)).endswith(
        "; 5 more runs and 5 more of the earlier work needed"
    )


@pytest.mark.parametrize("case", BASELINE_CASES)
def test_equal_sweeps_are_seldom_called_slower(case: str) -> None:
    assert measure_verdicts(case, loss=0.0, simulations=300, seed=0)[Verdict.SLOWER] <= 1.0


def test_a_clear_loss_is_called_slower() -> None:
    assert measure_verdicts("10 steps of 1%", loss=0.10, simulations=200, seed=0)[Verdict.SLOWER] >= 90
    assert measure_verdicts("2 steps of 1%, 1% between runs", 0.10, 50, 0)[Verdict.INCONCLUSIVE] == 100


@given(*[st.floats(1, 1e6)] * 2, *[st.floats(1e-6, 0.5)] * 2)
def test_one_result_is_faster_exactly_where_the_other_one_is_slower(
    first: float, second: float, first_spread: float, second_spread: float
) -> None:
    one, other = value(first, first_spread), value(second, second_spread)
    compared, swapped = judge([one], [other], GATE), judge([other], [one], GATE)
    assert (compared.verdict is Verdict.FASTER) == (swapped.verdict is Verdict.SLOWER)
    assert math.isclose(swapped.ratio.low * compared.ratio.high, 1)
    assert judge([Interval(first)], [other], GATE).verdict is Verdict.INCONCLUSIVE
