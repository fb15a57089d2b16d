"""The bands around estimates cover left-out runs, and the scoreboard is what the rows say."""

import math
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.planner import FAMILIES, ROWS, left_out_of_all, read_runs
from benchmarks.planner_bands import Residual, coverage, half_widths, known_of, trainer_factors
from benchmarks.planner_scoreboard import PAGE, page
from tests.support.planner import cluster, job
from workloads.estimator.estimate import bands, find_band
from workloads.layouts.layout import Layout
from workloads.layouts.trainers import TRAINERS
from workloads.models.hugging_face import load_model


@pytest.fixture(scope="module")
def found() -> list[Residual]:
    return left_out_of_all(read_runs(ROWS)[0])


@pytest.mark.parametrize("family", FAMILIES)
def test_bands_are_those_of_the_rows_and_cover_sources_that_they_do_not_know(
    found: list[Residual], family: str
) -> None:
    theirs = [residual for residual in found if residual.family == family]
    widths = [math.ceil(width) / 100 for width in half_widths(theirs)]
    assert [band.error_share for band in bands()[family]] == pytest.approx(widths, abs=0.011)
    assert widths == sorted(widths)
    covered = coverage(theirs)
    # Split-conformal bands cover at least 90%, and more where few sources give them: 98% of 17 with experts.
    assert covered.share >= 0.8 and covered.interval[1] >= 0.9


def _residuals(errors: dict[str, list[float]], distance: int = 0) -> list[Residual]:
    run: Any = read_runs(ROWS)[0][0]
    return [
        Residual(replace(run, row={**run.row, "source": source}), "dense", error, distance)
        for source, some in errors.items()
        for error in some
    ]


def test_sources_have_equal_weight_and_farther_runs_no_narrower_band() -> None:
    many = {f"s{n}": [1.0] * 50 for n in range(9)}
    assert half_widths(_residuals(many | {"s9": [8.0]})) == [8.0, 8.0, 8.0]  # 90% and the correction: all ten sources
    near, far = _residuals(many | {"s9": [8.0]}), _residuals({f"f{n}": [5.0] for n in range(4)}, distance=1)
    assert half_widths([*near, *far]) == [8.0, 8.0, 8.0]
    assert half_widths([*near, *_residuals({f"f{n}": [20.0] for n in range(4)}, distance=1)]) == [8.0, 20.0, 20.0]


def test_a_trainer_with_larger_errors_has_a_wider_band_at_the_same_coverage() -> None:
    run: Any = read_runs(ROWS)[0][0]

    def by(trainer: str, unit: float) -> list[Residual]:
        its = replace(run.job, trainer=trainer)
        rows = [(unit * n, {**run.row, "source": f"{trainer} {n}"}) for n in range(1, 21)]
        return [Residual(replace(run, row=row, job=its), "dense", error, 0) for error, row in rows]

    small, large = by("nemo", 0.2), by("torchtitan", 1.0)  # errors of up to 4 and 20%
    factors = trainer_factors([*small, *large])
    assert factors == pytest.approx({"nemo": (20 / 3 + 1) / 21, "torchtitan": (20 * 5 / 3 + 1) / 21})
    assert trainer_factors([replace(each, family="memory") for each in small]) == {}
    width, covered = half_widths([*small, *large])[0], coverage([*small, *large])
    assert 3.6 <= width * factors["nemo"] < 5 and 17 <= width * factors["torchtitan"] < 23
    assert covered.share >= 0.9 and covered.median_width < 18  # without factors, both have 18


def test_a_plan_has_the_band_of_its_trainer() -> None:
    band, work = bands()["dense"][0], job(Layout())
    assert band.factors["own"] < 1 < band.factors["torchtitan"]
    kinds = ("megatron-bridge", "megatron-core", "megatron-lm")
    of_megatron = max(band.factors.get(kind, 0.0) for kind in kinds)  # `trainer=megatron` stands for any of these
    wanted = {"megatron": of_megatron} | {name: band.factors[name] for name in ("own", "torchtitan", "nemo")}
    for trainer, factor in wanted.items():
        share = find_band(replace(work, trainer=trainer), cluster(8)).error_share
        assert share == pytest.approx(band.error_share * factor), trainer


def test_no_band_reaches_a_rate_of_zero() -> None:
    for name in ("llama3_8b", "qwen3_30b_a3b"):
        for trainer in TRAINERS:
            work = replace(job(Layout()), model=load_model(name), trainer=trainer, sequence_length=10_000_000)
            assert 0 < find_band(work, cluster(1 << 17)).error_share <= 0.9


def test_what_no_run_shows_is_named() -> None:
    known = known_of(run for run in read_runs(ROWS)[0] if run.family == "dense")
    missing = known.missing(job(Layout()), cluster(8))
    assert missing == ["no measured run of trainer=own is among those that the band rests on"]
    work = replace(job(Layout()), trainer="prime-rl")
    assert known.missing(work, cluster(8))[0].startswith("no measured run of trainer=prime-rl on ")


@pytest.mark.parametrize(("gpus", "tokens", "beyond"), [(576, 65536, 0), (584, 65536, 1), (1024, 131072, 2)])
def test_clusters_and_lengths_beyond_all_runs_are_named(gpus: int, tokens: int, beyond: int) -> None:
    known = known_of(run for run in read_runs(ROWS)[0] if run.family == "dense")
    work = replace(job(Layout()), trainer="torchtitan", sequence_length=tokens)
    missing = [line for line in known.missing(work, cluster(gpus)) if "more than" in line]
    assert len(missing) == beyond


def test_a_plan_far_from_any_run_has_a_wider_band() -> None:
    work = replace(job(Layout()), trainer="nemo")
    far = replace(work, sequence_length=10_000_000)
    assert find_band(far, cluster(1 << 17)).error_share > find_band(work, cluster(8)).error_share


def test_the_scoreboard_is_what_the_command_writes() -> None:
    assert PAGE.read_text() == page()
