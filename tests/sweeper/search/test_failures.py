"""Failures that repeat stop a sweep."""

import pytest

from sweeper.common.trials import TrialStatus
from sweeper.search.progress import RepeatedFailures
from tests.support.factories import trial_record

COMPLETE, PRUNED, INFEASIBLE = TrialStatus.COMPLETE, TrialStatus.PRUNED, TrialStatus.INFEASIBLE
FAILED, LOST, TIMED_OUT, CANCELLED = TrialStatus.FAILED, TrialStatus.LOST, TrialStatus.TIMED_OUT, TrialStatus.CANCELLED


def stop_reason(*statuses: TrialStatus, limit: int | None = 3) -> str:
    """Return why a sweep stops whose trials ended so, each with its number in the reason."""
    failures = RepeatedFailures(limit)
    for number, status in enumerate(statuses):
        failures.add(trial_record(number, status=status, reason=f"exit code 3 at step {number}"))
    return failures.stop_reason


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [
        ([FAILED] * 3, "3 trials failed for the same reason: exit code 3 at step 2"),
        ([LOST] * 3, "3 trials were lost for the same reason: exit code 3 at step 2"),
        ([FAILED, TIMED_OUT, FAILED, TIMED_OUT, FAILED], "3 trials failed for the same reason: exit code 3 at step 4"),
        ([FAILED, INFEASIBLE, FAILED, CANCELLED, FAILED], "3 trials failed for the same reason: exit code 3 at step 4"),
        ([COMPLETE, *[FAILED] * 3], "3 trials failed for the same reason with no success in between: "),
        ([FAILED] * 2, ""),
        ([FAILED, FAILED, LOST], ""),
        ([FAILED, FAILED, COMPLETE, FAILED, FAILED], ""),
        ([FAILED, FAILED, PRUNED, FAILED, FAILED], ""),
        ([INFEASIBLE] * 9, ""),
        ([FAILED, FAILED, FAILED, COMPLETE], ""),  # the last was in flight, and shows that trials can work
    ],
)
def test_failures_of_one_kind_without_a_success_stop_a_sweep(statuses: list[TrialStatus], expected: str) -> None:
    reason = stop_reason(*statuses)
    assert reason.startswith(expected) if expected else reason == ""


def test_failures_for_different_reasons_are_counted_apart() -> None:
    failures = RepeatedFailures(3)
    for number in range(4):
        failures.add(trial_record(number, status=FAILED, reason=("no such file", "exit code 3")[number % 2]))
        assert failures.stop_reason == ""
    failures.add(trial_record(4, status=FAILED, reason="no such file"))
    assert failures.stop_reason == "3 trials failed for the same reason: no such file"


def test_without_a_limit_no_number_of_failures_stops_a_sweep() -> None:
    assert stop_reason(*[FAILED] * 50, limit=None) == ""


@pytest.mark.parametrize(
    ("nodes", "places", "stops"), [(1, "aaa", True), (2, "aaa", False), (2, "aba", True), (2, "   ", True)]
)
def test_failures_on_one_node_of_several_do_not_stop_a_sweep(nodes: int, places: str, stops: bool) -> None:
    failures = RepeatedFailures(3, nodes)
    for number, place in enumerate(places):
        failures.add(trial_record(number, status=FAILED, reason="no device", where={"node_ids": place.strip()}))
    assert bool(failures.stop_reason) == stops


def test_different_exit_codes_are_different_reasons() -> None:
    failures = RepeatedFailures(3)
    for number in range(6):
        failures.add(trial_record(number, status=FAILED, reason=f"the program ended with exit code {number}: step 4"))
    assert not failures.stop_reason
