"""The progress of a sweep."""

import pytest

from sweeper.common.trials import TrialRecord, TrialStatus
from sweeper.config.schema import Budget
from sweeper.search.progress import SweepProgress
from tests.support.factories import trial_record
from tests.support.studies import SCORE


def record(number: int, reason: str) -> TrialRecord:
    """Return a complete trial, or an infeasible one where there is a reason."""
    status = TrialStatus.INFEASIBLE if reason else TrialStatus.COMPLETE
    return trial_record(number, status=status, reason=reason, metrics={} if reason else {"score": 1.0})


def make_progress(*earlier: TrialRecord) -> SweepProgress:
    return SweepProgress(SCORE, Budget(trials=100), earlier)


def test_the_remaining_time_is_until_the_last_trial_of_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    progress = make_progress()
    now_s = [0.0]
    monkeypatch.setattr("sweeper.search.progress.time.monotonic", lambda: now_s[0])
    progress.start()
    assert progress.estimated_remaining_s(20) is None
    for number in range(10):
        progress.add(record(number, ""))
    now_s[0] = 30.0
    assert progress.estimated_remaining_s(20) == pytest.approx(30.0)


def test_limits_of_the_budget_end_the_search_and_are_named() -> None:
    progress = SweepProgress(SCORE, Budget(trials=4, patience=2), [])
    assert progress.has_budget_for_more(in_flight=3) and not progress.has_budget_for_more(in_flight=4)
    for number in range(3):  # the first is the best, and then two are not better
        assert progress.has_budget_for_more(in_flight=0) and progress.exhausted_limits() == {}
        progress.add(record(number, ""))
    assert not progress.has_budget_for_more(in_flight=0) and progress.exhausted_limits() == {"patience": 2}
    progress.add(record(3, "no GPU"))
    assert progress.exhausted_limits() == {"trials": 4, "patience": 2}
    assert progress.describe_exhausted() == "budget.trials=4 (4 used) and budget.patience=2 (3 used)"


def test_no_trial_starts_that_would_end_after_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials of 110 s each, within 250 s: two."""
    now_s = [0.0]
    monkeypatch.setattr("sweeper.search.progress.time.monotonic", lambda: now_s[0])
    progress = SweepProgress(SCORE, Budget(trials=None, time_s=250.0), [])
    progress.start()
    for number, starts in enumerate([True, True, False]):
        assert progress.has_budget_for_more(in_flight=0) == starts
        assert progress.exhausted_limits() == ({} if starts else {"time_s": 250.0})
        now_s[0] += 110.0
        progress.add(trial_record(number, started_at_s=now_s[0] - 110.0, ended_at_s=now_s[0], metrics={"score": 1.0}))


def test_the_share_of_timed_steps_is_of_all_trials_that_ended() -> None:
    progress = make_progress()
    metrics = {"score": 1.0, "steps": 5.0, "step_time_ms": 4_000.0}
    progress.add(trial_record(0, started_at_s=0.0, ended_at_s=50.0, metrics=metrics))
    progress.add(trial_record(1, status=TrialStatus.FAILED, started_at_s=50.0, ended_at_s=80.0, reason="x"))
    assert progress.timed_share == pytest.approx(0.25)


def test_gpu_hours_and_cost_count_running_trials_and_earlier_attempts() -> None:
    hour = [trial_record(0, started_at_s=0.0, ended_at_s=3600.0, metrics={"score": 1.0})]
    for limit in ({"gpu_hours": 24.0}, {"cost": 48.0}):
        budget = Budget(trials=None, **limit)
        progress = SweepProgress(
            SCORE, budget, hour, repeated=hour, gpus=8, gpu_price_per_hour=2.0
        )  # two trials of an hour on 8 GPUs: 16 GPU-hours
        assert progress.has_budget_for_more(in_flight=1, running_s=3599.0)
        assert not progress.has_budget_for_more(in_flight=1, running_s=3600.0)
        progress.add(trial_record(1, started_at_s=0.0, ended_at_s=3600.0))
        assert progress.exhausted_limits() == limit and progress.finished_trials == 2


def test_failures_of_an_earlier_run_do_not_stop_this_one() -> None:
    failed = [trial_record(n, status=TrialStatus.FAILED, reason="no file") for n in range(9)]
    progress = SweepProgress(SCORE, Budget(trials=100), failed)
    assert progress.stop_reason == ""
    for n in range(5):
        assert progress.stop_reason == ""
        progress.add(trial_record(9 + n, status=TrialStatus.FAILED, reason="no file"))
    assert progress.stop_reason == "5 trials failed for the same reason: no file"


def test_the_limit_that_is_used_most_binds_and_patience_does_not() -> None:
    budget = Budget(trials=8, gpu_hours=1.0, patience=1)
    ended = [trial_record(number, {"x": 1, "y": number}, started_at_s=0.0, ended_at_s=900.0) for number in range(2)]
    progress = SweepProgress(SCORE, budget, ended)
    assert progress.binding_limit(8) == (0.5, "gpu_hours 0.5 of 1") and progress.varying == {"y"}
    assert SweepProgress(SCORE, Budget(trials=4), ended).binding_limit(4) == (0.5, "")
    resumed = SweepProgress(SCORE, Budget(trials=1), ended)
    assert resumed.describe_exhausted() == "budget.trials=1 (2 used with a larger budget)"
    assert SweepProgress(SCORE, Budget(trials=None, time_s=5.0), []).binding_limit(None) == (0.0, "time_s 0 of 5")


def test_the_mean_of_trials_counts_the_attempts_whose_time_it_has() -> None:
    earlier = [
        trial_record(n, started_at_s=0.0, ended_at_s=60.0, status=TrialStatus.FAILED, reason="x") for n in range(8)
    ]
    progress = SweepProgress(SCORE, Budget(time_s=500.0), [], repeated=earlier)
    progress.add(trial_record(0, started_at_s=60.0, ended_at_s=66.0, metrics={"score": 1.0}))
    assert progress.mean_trial_s == pytest.approx((8 * 60 + 6) / 9)
    assert progress.binding_limit(None)[1] == f"time_s {progress.elapsed_s:.4g} of 500"
