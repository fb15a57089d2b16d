"""Runs against earlier ones: when they are slower, how many more runs it takes to tell, and equal points in pairs."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.track import Case, simulate
from sweeper.results import runs
from sweeper.results.comparison import describe_pairs, find_pairs
from tests.support.factories import complete_trials
from workloads.api.errors import UserInputError

GATE = runs.Gate()
ERROR = 0.003**2


def make_runs(count: int, spread: float, level: float = 0.0) -> list[runs.Run]:
    """Return runs whose values have exactly this mean and standard deviation, as logarithms."""
    distances = np.linspace(-1, 1, count) if count > 1 else np.zeros(1)
    scale = spread / distances.std(ddof=1) if count > 1 else 0.0
    return [runs.Run(level + scale * distance, ERROR) for distance in distances]


def test_a_short_history_takes_the_assumed_spread_and_a_long_one_measures_it() -> None:
    short = runs.compare_runs(make_runs(5, 0.004), make_runs(1, 0), GATE)
    assert short.spread.is_assumed and short.spread.value == GATE.between_runs
    long = runs.compare_runs(make_runs(11, 0.005), make_runs(1, 0), GATE)
    assert long.spread.degrees_of_freedom == runs.MEASURED_FROM
    assert math.isclose(long.spread.value, math.sqrt(0.005**2 - ERROR))  # without the runs' own errors


def test_runs_that_contradict_the_assumed_spread_are_measured() -> None:
    compared = runs.compare_runs(make_runs(6, 0.06), make_runs(1, 0), GATE)
    assert not compared.spread.is_assumed and compared.spread.value > 0.05


def test_the_interval_of_the_change_includes_the_spread_between_runs() -> None:
    compared = runs.compare_runs(make_runs(1, 0), make_runs(1, 0), runs.Gate(between_runs=0.01))
    half_width = 1.96 * math.sqrt(2 * (0.01**2 + ERROR))
    assert math.log(compared.ratio.high) == pytest.approx(half_width, rel=1e-3)
    assert math.log(compared.ratio.low) == pytest.approx(-half_width, rel=1e-3)


@pytest.mark.parametrize(
    ("earlier", "new", "verdict"),
    [
        (make_runs(20, 0.005), make_runs(1, 0, -0.03), runs.Verdict.SLOWER),
        (make_runs(20, 0.005), make_runs(1, 0), runs.Verdict.NOT_SLOWER),
        (make_runs(20, 0.01), make_runs(1, 0, -0.012), runs.Verdict.INCONCLUSIVE),
        (make_runs(20, 0.001), make_runs(1, 0, -0.012), runs.Verdict.NOT_SLOWER),  # a real loss below the threshold
        (make_runs(20, 0.02), make_runs(1, 0, -0.03), runs.Verdict.INCONCLUSIVE),
        (make_runs(20, 0.02), make_runs(1, 0, -0.15), runs.Verdict.SLOWER),
        (
            make_runs(20, 0.005),
            [runs.Run(-0.05)],
            runs.Verdict.SLOWER,
        ),  # no interval: the measured spread includes its error
        (make_runs(2, 0.005), [runs.Run(-0.5)], runs.Verdict.INCONCLUSIVE),  # the assumed spread does not
        (make_runs(20, 0.005), [runs.Run(math.nan)], runs.Verdict.INCONCLUSIVE),
    ],
)
def test_a_verdict_follows_from_the_change_and_the_spread(
    earlier: list[runs.Run], new: list[runs.Run], verdict: runs.Verdict
) -> None:
    assert runs.compare_runs(earlier, new, GATE).verdict is verdict


@given(st.integers(1, 30), st.integers(1, 30), st.floats(0, 0.05), st.floats(-0.1, 0.1), st.floats(0, 0.05))
def test_more_runs_are_asked_for_exactly_where_there_is_no_verdict(
    earlier: int, new: int, spread: float, change: float, assumed: float
) -> None:
    compared = runs.compare_runs(
        make_runs(earlier, spread), make_runs(new, spread, change), runs.Gate(between_runs=assumed)
    )
    more = compared.more_new + compared.more_earlier
    assert (more > 0) == (compared.verdict is runs.Verdict.INCONCLUSIVE)
    if compared.spread.is_assumed:
        assert more <= max(1, runs.MEASURED_FROM - (earlier + new - 2))


def test_as_many_runs_as_are_asked_for_give_a_verdict_at_the_measured_spread() -> None:
    compared = runs.compare_runs(make_runs(12, 0.01), make_runs(2, 0.01, -0.019), GATE)
    assert compared.verdict is runs.Verdict.INCONCLUSIVE and compared.more_earlier == 0
    more = make_runs(2 + compared.more_new, 0.01, -0.019)
    assert runs.compare_runs(make_runs(12, 0.01), more, GATE).verdict is runs.Verdict.NOT_SLOWER


def test_a_value_where_less_is_better_is_slower_when_it_is_larger() -> None:
    earlier = [runs.run_of_interval(100, 99.9, 100.1, less_is_better=True)] * 12
    new = [runs.run_of_interval(120, 119.9, 120.1, less_is_better=True)]
    assert runs.compare_runs(earlier, new, GATE).verdict is runs.Verdict.SLOWER
    assert runs.compare_runs(new, earlier, GATE).verdict is runs.Verdict.FASTER


def test_the_worst_of_several_comparisons_decides() -> None:
    def compare(change: float) -> runs.Comparison:
        return runs.compare_runs(make_runs(20, 0.01), make_runs(1, 0, change), GATE)

    slower, unclear, equal = compare(-0.05), compare(-0.012), compare(0.0)
    assert runs.find_worst([equal, unclear, slower]) is slower and runs.find_worst([equal, unclear]) is unclear
    assert runs.find_worst([]) is None


@pytest.mark.parametrize("arguments", [{"threshold": 0.0}, {"threshold": 1.0}, {"between_runs": -0.1}])
def test_a_gate_that_can_never_decide_is_refused(arguments: dict[str, float]) -> None:
    with pytest.raises(UserInputError, match=r"^(threshold|between_runs)=.+, such as 0.02$"):
        runs.Gate(**arguments)


CASES = [Case(1, 0.01), Case(10, 0.005), Case(20, 0.01), Case(20, 0.01, looks_at_each=True)]


@pytest.mark.parametrize("case", [*CASES, pytest.param(Case(20, 0.02), marks=pytest.mark.soak)])
def test_equal_runs_are_seldom_called_slower_and_a_loss_is_found(case: Case) -> None:
    """With 60 comparisons, 1% of false alarms gives more than 3 in 0.3% of cases, and 90% fewer than 46 in 0.2%."""
    assert simulate(case, 0.0, simulations=60, seed=1).slower <= 3
    assert simulate(case, 0.03, simulations=60, seed=1).slower >= 46


def test_equal_points_are_paired_whatever_their_order() -> None:
    first = complete_trials({"H200": [100.0, 200.0, 300.0]}, m=[1, 2, 3])
    second = complete_trials({"H200": [330.0, 100.0, 50.0]}, m=[3, 1, 9])
    pairs = find_pairs(first, second)
    assert [(pair.params["m"], pair.ratio - 1) for pair in pairs] == [("3", pytest.approx(0.1)), ("1", 0.0)]
    assert not find_pairs(first, second.assign(**{"tag.device": "B200"}))
    assert not find_pairs(first, second.assign(**{"tag.outcome": "failed"}))


def test_the_median_difference_has_an_interval_from_five_pairs_on() -> None:
    speeds = [100.0 * number for number in range(1, 8)]
    first = complete_trials({"H200": speeds}, m=range(7))
    second = complete_trials({"H200": [1.1 * speed for speed in speeds]}, m=range(7))
    lines = describe_pairs(find_pairs(first, second))
    assert lines[0] == "point by point: 7 equal points, the second +10.0% in the median (95% +10.0% to +10.0%)"
    assert len(lines) == 6 and lines[1].startswith("  +10.0%  m=")
    assert "(93.75% +" in describe_pairs(find_pairs(first[:5], second[:5]))[0]
    (line, *_) = describe_pairs(find_pairs(first[:3], second[:3]))
    assert "3 equal points" in line and "fewer than 5 pairs" in line
    assert describe_pairs([]) == []
