"""Where a sweep stands."""

from __future__ import annotations

import pytest

from sweeper.common.trials import TrialRecord, TrialStatus
from sweeper.config.schema import Budget
from sweeper.search.state import FEW, SweepProgress


def record(number: int, reason: str, elapsed_s: float = 1.0) -> TrialRecord:
    status = TrialStatus.INFEASIBLE if reason else TrialStatus.COMPLETE
    metrics = {} if reason else {"score": 1.0}
    return TrialRecord(number, {"x": number}, status, reason, "", metrics, [], {}, 1e9, 1e9, elapsed_s)


def board(*before: TrialRecord) -> SweepProgress:
    return SweepProgress("score", "maximize", Budget(trials=100), before)


@pytest.mark.parametrize(
    ("reasons", "said"),
    [
        (["no GPU"] * FEW, "no GPU"),
        ([f"{n}.5 GiB too little" for n in range(FEW)], f"{FEW - 1}.5 GiB too little"),
        (["no GPU"] * (FEW - 1), ""),
        (["no GPU"] * (FEW - 1) + ["too little memory"], ""),
        ([""] + ["no GPU"] * (FEW - 1), ""),
        ([""] * FEW, ""),
    ],
)
def test_the_first_trials_that_end_alike_are_noticed(reasons: list[str], said: str) -> None:
    kept = board(*(record(n, "no GPU") for n in range(FEW)))  # of an earlier run, since when it was mended
    for n, reason in enumerate(reasons):
        assert kept.ended_alike() == ""
        kept.add(record(FEW + n, reason))
    assert kept.ended_alike() == said


def test_it_is_said_once() -> None:
    kept = board()
    heard = []
    for n in range(3 * FEW):
        kept.add(record(n, "no GPU"))
        heard.append(kept.ended_alike())
    assert [n + 1 for n, why in enumerate(heard) if why] == [FEW]


def test_the_time_left_is_until_the_last_trial_that_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, now = board(), [0.0]
    monkeypatch.setattr("sweeper.search.state.time.monotonic", lambda: now[0])
    kept.start()
    assert kept.left_s(20) is None
    for n in range(10):
        kept.add(record(n, ""))
    now[0] = 30.0
    assert kept.left_s(20) == pytest.approx(30.0)
