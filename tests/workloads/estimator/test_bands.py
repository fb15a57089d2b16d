"""The bands around estimates cover left-out runs, and the scoreboard is what the rows say."""

import math
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.planner import FAMILIES, ROWS, SCORED, left_out_of_all, read_runs, score_all
from benchmarks.planner_bands import (
    Residual,
    band_ends,
    coverage,
    describe_errors,
    known_of,
    side_factors,
    trainer_factors,
)
from benchmarks.planner_scoreboard import PAGE, page
from tests.support.planner import cluster, job
from workloads.estimator.estimate import bands, find_band
from workloads.layouts.layout import Layout
from workloads.layouts.trainers import TRAINERS, efficiencies
from workloads.models.hugging_face import load_model


@pytest.fixture(scope="module")
def found() -> list[Residual]:
    return left_out_of_all(read_runs(ROWS)[0])


@pytest.mark.parametrize("family", FAMILIES)
def test_bands_are_those_of_the_rows_and_cover_sources_that_they_do_not_know(
    found: list[Residual], family: str
) -> None:
    theirs = [residual for residual in found if residual.family == family]
    for side, ends in enumerate(zip(*band_ends(theirs), strict=True)):
        expected = [math.ceil(end) / 100 for end in ends]
        assert [band.ends[side] for band in bands()[family]] == pytest.approx(expected, abs=0.011)
        assert expected == sorted(expected)
    assert bands()[family][0].errors == describe_errors(theirs)
    covered = coverage(theirs)
    # Split-conformal bands cover at least 90%, and more where few sources give them: 98% of 17 with experts.
    assert covered.share >= 0.8 and covered.interval[1] >= 0.9


@pytest.mark.parametrize(
    ("trainer", "gpus", "missing"), [("own", 2, 0), ("own", 64, 1), ("torchtitan", 64, 0), ("torchtitan", 512, 1)]
)
def test_memory_on_many_gpus_is_known_of_a_trainer_from_its_own_runs(trainer: str, gpus: int, missing: int) -> None:
    work, target = replace(job(Layout()), trainer=trainer), cluster(gpus)
    ends = [band.ends.above for band in bands()["memory"]]
    assert find_band(work, target, "memory").ends.above == ends[missing] and ends[0] < ends[1]
    known = bands()["memory"][0].known
    assert len(known.missing(work, target)) == missing and max(known.pairs.values()) > 64


def test_no_run_allocates_more_than_its_bound() -> None:
    runs = [run for path in SCORED for run in read_runs(path)[0]]
    slacks = [score.error_percent for score in score_all(runs, efficiencies()) if score.family == "memory"]
    assert len(slacks) > 90 and min(slacks) >= 0


def _residuals(errors: dict[str, list[float]], distance: int = 0) -> list[Residual]:
    run: Any = read_runs(ROWS)[0][0]
    return [
        Residual(replace(run, row={**run.row, "source": source}), "dense", error, distance)
        for source, some in errors.items()
        for error in some
    ]


def test_sources_have_equal_weight_and_farther_runs_no_narrower_band() -> None:
    many = {f"s{n}": [1.0] * 50 for n in range(9)}
    assert _ends(_residuals(many | {"s9": [8.0]})) == [8.0, 8.0, 8.0]  # 90% and the correction: all ten sources
    near, far = _residuals(many | {"s9": [8.0]}), _residuals({f"f{n}": [5.0] for n in range(4)}, distance=1)
    assert _ends([*near, *far]) == [8.0, 8.0, 8.0]
    assert _ends([*near, *_residuals({f"f{n}": [20.0] for n in range(4)}, distance=1)]) == [8.0, 20.0, 20.0]


def _ends(some: list[Residual]) -> list[float]:
    """Return the upper ends of a trainer's band, relative to this trainer."""
    return [round(above, 6) for _, above in band_ends(some)]


def test_a_band_reaches_farther_to_the_side_of_the_larger_errors() -> None:
    errors = {f"s{n}": [-float(n + 1), (n + 1) / 4] for n in range(20)}  # down to -20%, up to 5%
    below, above = side_factors(_residuals(errors))
    # The geometric mean of 2 to 21 is 9.67, of 1.25 to 6 it is 3.30, of all 5.65; 1 is taken off each.
    assert (below, above) == pytest.approx((8.67 / 4.65, 2.30 / 4.65), abs=0.01)
    (low, high), covered = band_ends(_residuals(errors))[0], coverage(_residuals(errors))
    assert low / high == pytest.approx(below / above) and 18 <= low <= 22 and 4.5 <= high <= 6
    assert covered.share >= 0.9 and covered.median_ends == pytest.approx((low, high), rel=0.05)


def test_memory_has_an_end_of_its_own_on_each_side() -> None:
    run: Any = read_runs(ROWS)[0][0]
    rows = [replace(run, row={**run.row, "source": f"s{n}"}) for n in range(20)]
    measured = [1 / 1.25 if n % 2 else 1 / 0.95 for n in range(20)]  # of an estimate of 1: 20% less or 5.3% more
    some = [Residual(row, "memory", 100 / value - 100, 0) for row, value in zip(rows, measured, strict=True)]
    assert band_ends(some)[0] == pytest.approx((20, 100 / 0.95 - 100))


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
    width, covered = _ends([*small, *large])[0], coverage([*small, *large])
    assert 3.6 <= width * factors["nemo"] < 5 and 17 <= width * factors["torchtitan"] < 23
    assert covered.share >= 0.9 and max(covered.median_ends) < 18  # without factors, both have 18


def test_a_plan_has_the_band_of_its_trainer() -> None:
    band, work = bands()["dense"][0], job(Layout())
    assert band.factors["own"] < 1 < band.factors["torchtitan"]
    kinds = ("megatron-bridge", "megatron-core", "megatron-lm")
    of_megatron = max(band.factors.get(kind, 0.0) for kind in kinds)  # `trainer=megatron` stands for any of these
    wanted = {"megatron": of_megatron} | {name: band.factors[name] for name in ("own", "torchtitan", "nemo")}
    for trainer, factor in wanted.items():
        ends = find_band(replace(work, trainer=trainer), cluster(8)).ends
        assert ends == pytest.approx([end * factor for end in band.ends]), trainer


def test_no_band_reaches_a_rate_of_zero() -> None:
    for name in ("llama3_8b", "qwen3_30b_a3b"):
        for trainer in TRAINERS:
            work = replace(job(Layout()), model=load_model(name), trainer=trainer, sequence_length=10_000_000)
            assert 0 < find_band(work, cluster(1 << 17)).ends.below <= 0.9


def test_what_no_run_shows_is_named() -> None:
    known = known_of((run for run in read_runs(ROWS)[0] if run.family == "dense"), "dense")
    missing = known.missing(job(Layout()), cluster(8))
    assert missing == ["no measured run of trainer=own is among those that the band rests on"]
    work = replace(job(Layout()), trainer="prime-rl")
    assert known.missing(work, cluster(8))[0].startswith("no measured run of trainer=prime-rl on ")


@pytest.mark.parametrize(("gpus", "tokens", "beyond"), [(576, 65536, 0), (584, 65536, 1), (1024, 131072, 2)])
def test_clusters_and_lengths_beyond_all_runs_are_named(gpus: int, tokens: int, beyond: int) -> None:
    known = known_of((run for run in read_runs(ROWS)[0] if run.family == "dense"), "dense")
    work = replace(job(Layout()), trainer="torchtitan", sequence_length=tokens)
    missing = [line for line in known.missing(work, cluster(gpus)) if "more than" in line]
    assert len(missing) == beyond


def test_a_plan_far_from_any_run_has_a_wider_band() -> None:
    work = replace(job(Layout()), trainer="nemo")
    far = replace(work, sequence_length=10_000_000)
    assert find_band(far, cluster(1 << 17)).ends > find_band(work, cluster(8)).ends


def test_the_scoreboard_is_what_the_command_writes() -> None:
    assert PAGE.read_text() == page()
