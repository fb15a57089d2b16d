"""Two sweeps compared point by point."""

import pytest

from sweeper.results.comparison import describe_pairs, find_pairs
from tests.support.factories import complete_trials


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
    (line, *_) = describe_pairs(find_pairs(first[:3], second[:3]))
    assert "3 equal points" in line and "fewer than 5 pairs" in line
    assert describe_pairs([]) == []
