"""The intervals of step times hold as often as promised, and say so where they cannot."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.coverage import measure_coverage
from benchmarks.noise import KINDS
from sweeper.metrics import intervals
from sweeper.metrics.derivation import derive
from workloads.api.contract import Measurement

INDEPENDENT = ("log-normal 1%", "5% slow outliers", "bimodal clock 60/40")
PROMISED = [(kind, steps) for kind in INDEPENDENT for steps in (5, 8, 20, 100)]
PROMISED += [("AR(1) 0.5", 50), ("AR(1) 0.5", 200), ("AR(1) 0.9", 200)]
PROMISED += [("clock that sticks for about 20 steps", 500)]


@pytest.mark.parametrize(("kind", "steps"), PROMISED)
def test_the_interval_of_the_median_holds_from_the_promised_number_of_steps(kind: str, steps: int) -> None:
    coverage = measure_coverage(kind, steps, "median", 400, seed=0)
    assert 90 <= coverage.covered <= 97
    assert coverage.marked <= (30 if kind not in INDEPENDENT else 8)


@pytest.mark.parametrize(
    ("kind", "steps"),
    [("AR(1) 0.5", 20), ("AR(1) 0.9", 20), ("AR(1) 0.9", 100), ("clock that sticks for about 20 steps", 200)],
)
def test_most_shorter_series_of_correlated_steps_are_marked(kind: str, steps: int) -> None:
    assert measure_coverage(kind, steps, "median", 400, seed=0).marked > 50


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("statistic", ["median", "mean"])
def test_fewer_than_five_steps_have_no_interval(kind: str, statistic: str) -> None:
    for times in KINDS[kind](20, 4, np.random.default_rng(0)):
        assert intervals.interval_of_steps(times, statistic) is None


def test_the_fastest_step_has_no_interval() -> None:
    assert intervals.interval_of_steps(np.arange(1.0, 40.0), "fastest") is None


@given(st.lists(st.floats(1e-4, 1e-2), min_size=5, max_size=60), st.sampled_from(["median", "mean"]))
def test_an_interval_holds_its_value_and_lies_above_the_fastest_step(times: list[float], statistic: str) -> None:
    interval = intervals.interval_of_steps(np.array(times), statistic)
    if interval is None:
        return
    slack = 1e-9 * max(times)
    assert min(times) - slack <= interval.low <= interval.value + slack
    assert interval.value - slack <= interval.high
    assert statistic == "mean" or interval.high <= max(times) + slack


def test_a_drift_is_no_noise() -> None:
    """A device that slows down all the time has no median to be sure of, however many steps it makes."""
    times = np.linspace(1.0, 1.1, 2000) * np.exp(0.001 * np.random.default_rng(0).standard_normal(2000))
    assert (
        intervals.estimate_correlation(times, "median").is_too_short
        and intervals.interval_of_steps(times, "median") is None
    )


def test_equal_step_times_are_not_correlated() -> None:
    """A log prints few digits: many steps are equal, and all may be."""
    constant = intervals.interval_of_steps(np.full(50, 2.0), "median")
    assert constant == intervals.Interval(2.0, 2.0, 2.0)
    rounded = np.round(2 + 0.05 * np.random.default_rng(0).standard_normal(200), 1)
    assert intervals.interval_of_steps(rounded, "median") == intervals.Interval(2.0, 2.0, 2.0)


@pytest.mark.parametrize("resolution", [0.001, 0.01, 0.05])
@pytest.mark.parametrize(("statistic", "center"), [("median", 2.0037), ("mean", 2.0037 * math.exp(0.002**2 / 2))])
def test_intervals_of_rounded_times_cover_as_often_as_they_promise(
    resolution: float, statistic: str, center: float
) -> None:
    """Step times with a spread of 0.2%, as a log prints them: without the resolution 0.01 s are covered never."""
    rng, covered = np.random.default_rng(0), 0
    for _ in range(300):
        times = resolution * np.round(2.0037 * np.exp(0.002 * rng.standard_normal(40)) / resolution)
        interval = intervals.interval_of_steps(times, statistic, resolution=resolution)
        covered += interval is None or interval.low <= center <= interval.high
        assert interval is None or interval.high - interval.low < 2 * resolution + 0.01
    assert covered >= 0.93 * 300


def test_times_that_are_no_longer_than_their_resolution_have_no_interval() -> None:
    metrics = derive([Measurement({}, (1.0,) * 9, tokens_per_step=1, step_resolution_s=2.0)], {})
    assert (
        intervals.missing_reason(metrics, "tokens_per_s") == intervals.TOO_COARSE
        and "tokens_per_s_ci_low" not in metrics
    )


def test_a_ratio_is_as_uncertain_as_both_of_its_values() -> None:
    ratio = intervals.ratio_interval(intervals.Interval(2.0, 1.9, 2.1), intervals.Interval(1.0, 1.0, 1.0))
    assert (ratio.value, ratio.low, ratio.high) == pytest.approx((2.0, 1.9, 2.1))
    wider = intervals.ratio_interval(intervals.Interval(2.0, 1.9, 2.1), intervals.Interval(1.0, 0.95, 1.05))
    assert wider.low < ratio.low and wider.high > ratio.high


@pytest.mark.parametrize(
    ("times", "reason"),
    [
        (np.full(3, 1.0), intervals.TOO_FEW),
        (np.linspace(1, 2, 50), intervals.TOO_SHORT),
        (np.array([1.0, 1.1, 1.0, 1.2, 1.1]), ""),
    ],
)
def test_a_rate_without_an_interval_says_why(times: np.ndarray, reason: str) -> None:
    metrics = derive([Measurement({}, tuple(times), tokens_per_step=1)], {})
    assert intervals.missing_reason(metrics, "tokens_per_s") == reason
    assert ("tokens_per_s_ci_low" in metrics) == (reason == "")
    rates = {"steps": 20.0, "effective_steps": 2.0, "tokens_per_s": 5.0}  # of a log of rates, which has no step times
    assert intervals.missing_reason(rates, "tokens_per_s") == intervals.TOO_SHORT
    assert (
        intervals.missing_reason({"score": 1.0}, "score")
        == intervals.missing_reason({**metrics, "score": 1.0}, "score")
        == ""
    )
