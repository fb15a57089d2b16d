"""The band around estimates is what published runs show."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.planner import FAMILIES, ROWS, read_runs, score_left_out
from tests.support.planner import cluster, job
from workloads.estimator.estimate import COVERED, bands, find_band, half_width
from workloads.layouts.layout import Layout
from workloads.models.model import Model


def test_the_table_has_the_errors_of_runs_whose_source_was_left_out() -> None:
    runs, _ = read_runs(ROWS)
    scores = score_left_out(runs, runs)
    for family in FAMILIES:
        errors = [score.error_percent for score in scores if score.family == family]
        band = bands()[family]
        assert band.runs == len(errors)
        assert 100 * band.error_share == pytest.approx(half_width(errors), abs=1.5)


@given(st.lists(st.floats(-50, 50), min_size=1, max_size=60))
def test_a_band_covers_nine_of_ten_errors_and_no_narrower_one_does(errors: list[float]) -> None:
    width = half_width(errors)
    within = [error for error in errors if abs(error) <= width]
    narrower = [error for error in errors if abs(error) < width]
    assert len(within) >= COVERED * len(errors)
    assert len(errors) < 10 or len(narrower) < COVERED * len(errors)


def test_what_no_run_shows_is_named() -> None:
    experts = Model(32, 4096, 32, 8, 128, 0, 32000, experts=8, experts_per_token=2, expert_intermediate_size=512)
    assert find_band(job(Layout(), experts)).runs < find_band(job(Layout())).runs
    missing = find_band(job(Layout())).missing(job(Layout()), cluster(8))
    assert missing == ["no published run of trainer=own is among those that the band rests on"]
