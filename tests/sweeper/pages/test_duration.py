"""The estimated duration of a sweep."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from sweeper.config.schema import Budget
from sweeper.pages import plan_view
from sweeper.pages.plan_view import DurationNote
from sweeper.search.progress import SweepProgress
from tests.support.factories import trial_record
from tests.support.studies import SCORE


@dataclass
class Training:
    """The parameters of a workload of steps."""

    batch: int
    global_batch: int = 8
    sequence_length: int = 1000
    warmup: int = 2
    steps: int = 8


def plan(
    tokens_per_s: float,
    *,
    trials: int | None = 100,
    time_s: float | None = None,
    gangs: int = 1,
    parameters: Any = Training,
) -> Any:
    candidate = SimpleNamespace(point={"batch": 1}, estimate=SimpleNamespace(metrics={"tokens_per_s": tokens_per_s}))
    return SimpleNamespace(
        config=SimpleNamespace(budget=Budget(trials=trials, time_s=time_s), finals=SimpleNamespace(top=3, rounds=5)),
        estimates=SimpleNamespace(valid=[candidate] * 50),
        space=SimpleNamespace(constants={}),
        resolved=SimpleNamespace(workload=SimpleNamespace(Parameters=parameters)),
        resources=SimpleNamespace(gangs=gangs),
        criteria=SCORE,
    )


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, "estimate about 1:06:40 of steps"),  # of 50 points: 10 steps of 8 s each
        ({"gangs": 4}, "estimate about 16:40 of steps"),
        ({"trials": 1}, "estimate about 1:20 of steps"),
        (
            {"time_s": 3999.0},
            "estimate about 1:06:40 of steps by the cost model; starting and compiling come on top; "
            "budget.time_s has room for the steps of 49 trials",
        ),
        ({"trials": None}, ""),
        ({"parameters": lambda batch: object()}, ""),
        ({"tokens_per_s": 1e6}, ""),  # 4 s
    ],
)
def test_the_cost_model_gives_the_duration_of_a_long_sweep(arguments: dict[str, Any], expected: str) -> None:
    line = plan_view.describe_duration(plan(**{"tokens_per_s": 1000.0, **arguments}))
    assert line.startswith(expected) if expected else line == ""


LONG = "estimate about 16:10 until the budget is used up, then 2:30 of finals (15 measurements)"


@pytest.mark.parametrize(("trial_s", "expected"), [(10.0, ["", "", LONG, "", ""]), (0.1, [""] * 5)])
def test_the_first_trials_give_the_duration_once(
    trial_s: float, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 0.0
    monkeypatch.setattr("sweeper.search.progress.time.monotonic", lambda: now_s)
    progress = SweepProgress(SCORE, Budget(trials=100), [])
    progress.start()
    note, lines = DurationNote(plan(1.0)), []
    for number in range(5):
        now_s += trial_s
        progress.add(trial_record(number, started_at_s=0.0, ended_at_s=trial_s))
        lines.append(note.next_line(progress, 100, 1))
    assert lines == expected
