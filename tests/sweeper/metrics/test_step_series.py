"""What is unusual in step times: faults are named, and clean series have no finding."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sweeper.metrics.step_series import FEWEST, compare_sources, find_period, find_slow_sources, find_unusual
from tests.conftest import examples

STEPS = 400
PLACE = np.arange(STEPS)


def series(slower: np.ndarray | float = 0.0, spread: float = 0.01, seed: int = 0) -> np.ndarray:
    return np.exp(np.random.default_rng(seed).normal(0, spread, STEPS)) * (1 + slower)


@pytest.mark.parametrize("seed", range(10))
def test_a_clean_series_has_no_finding(seed: int) -> None:
    assert find_unusual(range(STEPS), series(seed=seed)) == []


@pytest.mark.parametrize(
    ("slower", "kind", "first", "last"),
    [
        (0.06 * PLACE / STEPS, "drift", 0, 399),
        (0.05 * (PLACE >= 240), "jump", 240, 399),
        (0.05 * ((PLACE >= 120) & (PLACE < 220)), "phase", 120, 220),
    ],
    ids=["drift", "jump", "phase"],
)
def test_a_trend_is_named_with_its_size_and_place(slower: np.ndarray, kind: str, first: int, last: int) -> None:
    (finding,) = find_unusual(range(STEPS), series(slower))
    assert finding.kind == kind and finding.low < slower.max() < finding.high
    assert finding.first == pytest.approx(first, abs=2) and finding.last == pytest.approx(last, abs=2)


def test_the_size_of_a_drift_is_that_over_all_steps_and_its_interval_covers_it() -> None:
    drift = 1.15 ** (PLACE / STEPS) - 1
    found = [find_unusual(range(STEPS), series(drift, seed=seed))[0] for seed in range(40)]
    assert np.mean([finding.share for finding in found]) == pytest.approx(0.15, abs=0.002)
    assert sum(finding.low < 0.15 < finding.high for finding in found) >= 35


@given(st.integers(150, STEPS), st.floats(0.25, 0.75))
@examples(20)
def test_a_clear_jump_begins_at_its_first_slow_step(steps: int, share: float) -> None:
    first = int(share * steps)
    (finding,) = find_unusual(range(steps), series(0.3 * (first <= PLACE))[:steps])
    assert (finding.kind, finding.first) == ("jump", first)


def test_pauses_have_their_period_and_their_share_of_the_time_and_make_no_trend() -> None:
    (finding,) = find_unusual(range(1, STEPS + 1), series(2.0 * ((PLACE + 1) % 50 == 0)))
    assert (finding.kind, finding.period, len(finding.places)) == ("pauses", 50, 8)
    assert finding.share == pytest.approx(16 / (STEPS + 16), rel=0.05)


def test_a_few_slow_steps_are_usual_and_many_without_a_period_are_stalls() -> None:
    random = np.random.default_rng(3)
    few, many = (np.isin(PLACE, random.choice(STEPS, count, replace=False)) for count in (5, 24))
    assert find_unusual(range(STEPS), series(1.0 * few)) == []
    assert [finding.kind for finding in find_unusual(range(STEPS), series(1.0 * many))] == ["stalls"]


def test_too_few_steps_have_no_finding() -> None:
    assert find_unusual(range(FEWEST - 1), series(0.5 * (PLACE > 20))[: FEWEST - 1]) == []


@pytest.mark.parametrize(
    ("places", "interval", "period"),
    [
        ([50, 100, 150, 200], 1, 50),
        ([50, 150, 200, 250, 300, 350], 1, 50),
        ([7, 50, 100, 133, 150, 200], 1, 50),
        ([13, 50, 71, 160], 1, 0),
        ([11, 21, 30, 40], 10, 0),
        ([30, 50, 80, 100, 130, 150], 10, 0),  # a period of 25 is not seen in lines of every tenth step
        ([100, 200, 310, 400, 500, 600], 10, 100),
    ],
)
def test_a_period_is_that_of_most_slow_steps_with_nearly_no_gap(places: list[int], interval: int, period: int) -> None:
    assert find_period(np.array(places), interval) == period


def test_the_source_that_takes_longer_in_the_same_steps_is_found_though_all_drift_together() -> None:
    shared = series(0.2 * PLACE / STEPS)
    ranks = {f"rank{n}": dict(enumerate(shared * series(0.04 * (n == 2), 0.005, n))) for n in range(4)}
    found = find_slow_sources(compare_sources(ranks))
    assert list(found) == ["rank2"] and found["rank2"].share == pytest.approx(0.04, abs=0.005)
    assert not find_slow_sources(compare_sources({name: own for name, own in ranks.items() if name != "rank2"}))
