"""Measured step times over planned ones: within a sweep, and kept for the next one."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from sweeper.common.trials import Remeasurement, TrialRecord, TrialStatus
from sweeper.preflight.corrections import FILE, Correction, MeasuredFactors, Place, find, from_sweep, keep, read
from tests.conftest import CommandResult
from workloads.api.errors import UserInputError

PLACE = Place("h200", "parallel", 8, 8, "nodes of 8", "parallel/3")
CORRECTION = Correction(PLACE, 1.25, 7, 1.1, 1.3, "2026-11-20")


def record(
    number: int, tokens_per_s: float, status: TrialStatus = TrialStatus.COMPLETE, **params: float | None
) -> TrialRecord:
    metrics = {"tokens_per_s": tokens_per_s}
    return TrialRecord(number, {"tp": number, **params}, status, "", "", metrics, [], {}, 0.0, 1.0, 1.0)


def factors_of(*tokens_per_s: float) -> MeasuredFactors:
    """Of trials that were each estimated to have 100 tokens/s and a step of 10 ms."""
    factors = MeasuredFactors(lambda _: {"tokens_per_s": 100.0, "step_time_ms": 10.0})
    for number, rate in enumerate(tokens_per_s):
        factors.add(record(number, rate))
    return factors


def test_the_trials_of_a_sweep_correct_the_prediction_of_those_that_follow() -> None:
    factors = factors_of()
    assert factors.predict({"tp": 9}, "tokens_per_s") == {"predicted_tokens_per_s": 100.0}
    factors = factors_of(50, 80, 90)
    assert factors.predict({"tp": 9}, "tokens_per_s") == {"predicted_tokens_per_s": pytest.approx(80)}
    assert factors.predict({"tp": 9}, "step_time_ms") == {"predicted_step_time_ms": pytest.approx(12.5)}
    assert factors.predict({"tp": 9}, "loss") == {}


def test_failed_trials_and_those_of_finals_correct_nothing() -> None:
    factors = factors_of()
    factors.add(record(1, 50, TrialStatus.FAILED))
    factors.add(replace(record(2, 50), remeasurement=Remeasurement(1, 0, ())))
    assert factors.predict({"tp": 9}, "tokens_per_s") == {"predicted_tokens_per_s": 100.0}


def test_routings_of_experts_have_their_own_factors() -> None:
    factors = factors_of()
    for number, (rate, imbalance) in enumerate([(80, 1.0), (50, None), (80, 1.0), (50, None), (80, 1.0), (50, None)]):
        factors.add(record(number, rate, imbalance=imbalance))
    for imbalance, rate in ((1.0, 80), (None, 50), (4.0, 100)):
        assert factors.predict({"tp": 9, "imbalance": imbalance}, "tokens_per_s")["predicted_tokens_per_s"] == rate


def test_a_correction_contains_the_one_that_its_estimates_had() -> None:
    kept = from_sweep(PLACE, replace(CORRECTION, factor=2.0), factors_of(80, 50, 100), ended_at_s=0.0)
    assert kept is not None and (kept.factor, kept.rows, kept.low, kept.high) == (2.5, 3, 2.0, 4.0)
    assert from_sweep(PLACE, None, factors_of(80, 50), ended_at_s=0.0) is None  # two trials


def test_a_correction_is_kept_for_its_place_alone(tmp_path: Path) -> None:
    assert read(tmp_path) == []
    other = replace(CORRECTION, place=replace(PLACE, gpus=16), factor=1.5)
    for correction in (CORRECTION, other, replace(CORRECTION, factor=1.2)):
        keep(tmp_path, correction)
    stored = read(tmp_path)
    assert len(stored) == 2 and find(stored, PLACE) == replace(CORRECTION, factor=1.2)
    assert find(stored, replace(PLACE, benchmark_version="parallel/4")) is None


@pytest.mark.parametrize("text", ["{", "[1]", '[{"factor": 1}]'])
def test_a_damaged_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)
    with pytest.raises(UserInputError, match="move it away"):
        read(tmp_path)


def test_a_plan_is_corrected_by_what_an_earlier_sweep_measured(
    run_cli: Callable[..., CommandResult], tmp_path: Path
) -> None:
    command = ["workload=parallel", "gpus=8", "hardware=h200", "plan=true", "space.tp=1", "space.cp=1", "space.pp=1"]

    def fastest() -> float:
        result = run_cli(*command)
        assert result.code == 0, result.err
        is_kept = (tmp_path / "sweeps" / FILE).exists()
        assert ("step times x 1.25, the median of 7 layouts of parallel" in result.out) == is_kept
        return float(pd.read_csv(next(tmp_path.glob("sweeps/*/plan.csv"))).tokens_per_s.max())

    planned = fastest()
    keep(tmp_path, CORRECTION)
    assert fastest() == pytest.approx(planned / 1.25)
