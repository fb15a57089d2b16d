"""Names and ranking of trial records."""

import json

import pytest

from sweeper.common.format import exact_value, short_value
from sweeper.common.trials import Remeasurement, Retry, TrialRecord, TrialStatus, run_name
from sweeper.metrics.criteria import Criteria
from tests.support.factories import trial_record


def test_a_runs_name_has_the_number_and_the_parameters() -> None:
    params = {"m": 4096, "rate": 1 / 3, "dtype": "bf16"}
    assert run_name(12, params, None) == "0012 m=4096 rate=0.333333 dtype=bf16"
    again = Remeasurement(trial=3, round=1, group=(3, 5))
    assert run_name(40, {"m": 4096}, again) == "0040 round 1 of 0003 m=4096"
    assert len(run_name(0, {"text": "x" * 1000}, None)) == 250


@pytest.mark.parametrize(("direction", "numbers"), [("maximize", [2, 0, 1]), ("minimize", [1, 0, 2])])
def test_only_complete_trials_with_the_objective_are_ranked(direction: str, numbers: list[int]) -> None:
    records = [trial_record(number, metrics={"rate": rate}) for number, rate in enumerate([2.0, 1.0, 3.0])]
    records.append(trial_record(3, metrics={"other": 9.0}))
    records.append(trial_record(4, metrics={"rate": 9.0}, status=TrialStatus.FAILED))
    assert [record.number for record in Criteria.of({"rate": direction}).rank(records)] == numbers


@pytest.mark.parametrize(
    ("value", "exact", "short"),
    [
        (1048576.0, "1048576", "1048576"),
        (1048576.5, "1048576.5", "1.04858e+06"),
        (0.1, "0.1", "0.1"),
        (1 / 3, "0.3333333333333333", "0.333333"),
        (3e-05, "3e-05", "3e-05"),
        (1e300, "1e+300", "1e+300"),
        (float("inf"), "inf", "inf"),
        (12345678901, "12345678901", "12345678901"),
        (True, "True", "True"),
        (None, "None", "None"),
        ("x" * 600, "x" * 500, "x" * 500),
    ],
)
def test_a_parameter_is_stored_with_every_digit(value: object, exact: str, short: str) -> None:
    assert (exact_value(value), short_value(value)) == (exact, short)
    if isinstance(value, float):
        assert float(exact) == value


def test_records_that_are_read_together_are_equal_to_those_read_alone_and_share_what_is_equal() -> None:
    records = [
        trial_record(0, fixed={"repeats": 30}, measurements=[{"flops_per_step": 1.0}]),
        trial_record(1, fixed={"repeats": 30}, remeasurement=Remeasurement(0, 1, (0,))),
        trial_record(2, fixed={"repeats": 31}, status=TrialStatus.FAILED, retry=Retry(1, ("git commit was a, now b",))),
    ]
    together: list[TrialRecord] = []
    for record in records:
        fields = json.loads(record.to_json())
        together.append(TrialRecord.from_fields(fields, together[-1] if together else None))
    assert together == records == [TrialRecord.from_json(record.to_json()) for record in records]
    assert together[0].fixed is together[1].fixed is not together[2].fixed
