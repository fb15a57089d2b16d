"""Measured step times over planned ones: within a sweep, and kept for the next one."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from sweeper.common.trials import Remeasurement, TrialRecord, TrialStatus
from sweeper.preflight.corrections import FILE, Correction, Place, find, from_sweep, keep, read
from sweeper.preflight.cost_model import Candidate, CostEstimates
from tests.conftest import CommandResult
from workloads.api.contract import Estimate, Machine
from workloads.api.errors import UserInputError

PLACE = Place("h200", "parallel", 8, 8, "nodes of 8", "parallel/3")
CORRECTION = Correction(PLACE, 1.25, 7, 1.1, 1.3, "2026-11-20")


def record(
    number: int, tokens_per_s: float, status: TrialStatus = TrialStatus.COMPLETE, **params: float | None
) -> TrialRecord:
    metrics = {"tokens_per_s": tokens_per_s}
    return TrialRecord(number, {"tp": number, **params}, status, "", "", metrics, [], {}, 0.0, 1.0, 1.0)


def correct(before: Correction | None, *records: TrialRecord) -> Correction | None:
    """Return the correction from trials that were each estimated to have 100 tokens/s."""
    return from_sweep(PLACE, before, lambda _: {"tokens_per_s": 100.0}, records)


def test_the_prediction_of_a_trial_is_that_of_the_plan() -> None:
    estimate = Estimate(metrics={"tokens_per_s": 100.0, "memory_gib": 3.0})
    estimates = CostEstimates("tokens_per_s", Machine("cpu", "cpu", 1, 1), [Candidate({"tp": 9}, estimate)], [])
    assert estimates.predict({"tp": 9}) == {"predicted_tokens_per_s": 100.0}
    assert estimates.predict({"tp": 8}) == {} == replace(estimates, objective="loss").predict({"tp": 9})


def test_failed_trials_and_those_of_finals_correct_nothing() -> None:
    counted = [record(number, rate) for number, rate in enumerate((50, 80, 90))]
    failed, final = record(4, 10, TrialStatus.FAILED), replace(record(5, 10), remeasurement=Remeasurement(1, 0, ()))
    assert correct(None, *counted, failed, final) == correct(None, *counted) is not None


def test_a_correction_contains_the_one_that_its_estimates_had() -> None:
    trials = [record(number, rate) for number, rate in enumerate((80, 50, 100))]
    kept = correct(replace(CORRECTION, factor=2.0), *trials)
    assert kept is not None and (kept.factor, kept.rows, kept.low, kept.high) == (2.5, 3, 2.0, 4.0)
    assert correct(None, *trials[:2]) is None


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
