"""From readings of a counter to energy. The readings are computed: no GPU is here."""

from math import floor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workloads.api.contract import Energy
from workloads.api.gpus.energy import SHORTEST_S, EnergySample, energy_between


def read(
    power_w: float, *, until_s: float, changes_s: float, reads_s: float = 0.02, offset_s: float = 0.0
) -> list[EnergySample]:
    """Return readings of a device that draws this power, whose counter changes every `changes_s`."""
    times_s = [reads_s * number for number in range(int(until_s / reads_s) + 1)]
    return [
        EnergySample(time_s, power_w * changes_s * floor((time_s + offset_s) / changes_s), power_w)
        for time_s in times_s
    ]


def energy(samples: list[EnergySample], start_s: float, end_s: float) -> Energy:
    result = energy_between(samples, start_s, end_s, 10)
    assert result is not None
    return result


@given(st.floats(50, 1000), st.floats(0.02, 0.1), st.floats(0.0, 1.0), st.floats(1.001, 5.0), st.floats(0.0, 0.1))
def test_a_counter_that_changes_seldom_gives_the_power_to_within_three_percent(
    power_w: float, changes_s: float, start_s: float, seconds: float, offset_s: float
) -> None:
    samples = read(power_w, until_s=start_s + seconds + 0.1, changes_s=changes_s, offset_s=offset_s)
    result = energy(samples, start_s, start_s + seconds)
    assert result.source == "counter" and result.joules == pytest.approx(power_w * seconds, rel=0.03)
    assert (result.seconds, result.steps) == (pytest.approx(seconds), 10)


def test_what_was_drawn_before_and_after_the_window_does_not_count() -> None:
    idle = read(100, until_s=2, changes_s=0.1)
    busy = [
        EnergySample(2 + sample.at_s, 200 + (sample.energy_j or 0), sample.power_w)
        for sample in read(700, until_s=2, changes_s=0.1)
    ]
    assert energy(idle + busy[1:], 2, 4).joules == pytest.approx(1400, rel=0.02)


@pytest.mark.parametrize("seconds", [0.1, 0.5, 0.99])
def test_a_window_that_is_too_short_has_a_reason_instead_of_a_figure(seconds: float) -> None:
    result = energy(read(500, until_s=2, changes_s=0.1), 0.3, 0.3 + seconds)
    assert result.joules == 0 and f"needs {SHORTEST_S['counter']:g} s" in result.missing


def test_a_counter_that_changes_too_seldom_has_a_reason_instead_of_a_figure() -> None:
    assert "changed 2 times" in energy(read(500, until_s=2, changes_s=0.5), 0.0, 1.4).missing


def test_without_a_counter_the_sampled_power_counts_and_is_marked() -> None:
    samples = [EnergySample(sample.at_s, None, 400.0) for sample in read(400, until_s=7, changes_s=1)]
    result = energy(samples, 1.0, 6.5)
    assert (result.source, result.joules) == ("power", pytest.approx(400 * 5.5))
    assert "the sampled power needs 5 s" in energy(samples, 1.0, 3.0).missing


def test_a_counter_that_contradicts_the_power_is_not_believed() -> None:
    """As AMD GPUs are known whose counter is wrong by orders of magnitude."""
    samples = [EnergySample(s.at_s, (s.energy_j or 0) * 0.01, s.power_w) for s in read(400, until_s=7, changes_s=0.02)]
    assert energy(samples, 0.0, 6.0).source == "power"
    assert "rises by 4 W, at a power of 400 W" in energy(samples, 0.0, 2.0).missing


def test_a_device_that_reports_nothing_has_no_energy() -> None:
    assert energy_between([EnergySample(0.0, None, None)], 0.0, 2.0, 1) is None
    assert energy_between([], 0.0, 2.0, 1) is None
