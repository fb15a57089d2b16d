"""The band around estimates is what published runs show."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.planner import FAMILIES, LATER_ROWS, ROWS, read_runs, score_all, score_left_out
from tests.support.planner import cluster, job
from workloads.estimator.estimate import COVERED, bands, find_band, half_width
from workloads.layouts.layout import Layout
from workloads.layouts.trainers import efficiencies
from workloads.models.model import Model


def test_a_band_covers_published_runs_and_later_ones_each_by_themselves() -> None:
    published, _ = read_runs(ROWS)
    later, _ = read_runs(LATER_ROWS)
    left_out, unseen = score_left_out(published, published), score_all(later, efficiencies())
    for family in FAMILIES:
        groups = [[s.error_percent / 100 for s in some if s.family == family] for some in (left_out, unseen)]
        band = bands()[family]
        for errors in filter(None, groups):
            assert sum(abs(error) <= band.error_share for error in errors) >= 0.9 * len(errors)
        assert band.runs == sum(map(len, groups))
        assert band.low == pytest.approx(sum(error < 0 for errors in groups for error in errors), abs=1)


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


@pytest.mark.parametrize(("gpus", "tokens", "beyond"), [(576, 65536, 0), (584, 65536, 1), (1024, 131072, 2)])
def test_clusters_and_lengths_beyond_all_published_runs_are_named(gpus: int, tokens: int, beyond: int) -> None:
    work = replace(job(Layout()), trainer="torchtitan", sequence_length=tokens)
    missing = find_band(work).missing(work, cluster(gpus))
    assert len(missing) == beyond and all("more than" in line for line in missing)
