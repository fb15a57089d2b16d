"""The estimated duration of a sweep."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from sweeper.config.schema import Budget
from sweeper.pages import plan_view


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
        config=SimpleNamespace(budget=Budget(trials=trials, time_s=time_s)),
        estimates=SimpleNamespace(valid=[candidate] * 50),
        space=SimpleNamespace(constants={}),
        resolved=SimpleNamespace(workload=SimpleNamespace(Parameters=parameters)),
        resources=SimpleNamespace(gangs=gangs),
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
            "without them, budget.time_s has room for the steps of 49 trials",
        ),
        ({"trials": None}, ""),
        ({"parameters": lambda batch: object()}, ""),
        ({"tokens_per_s": 1e6}, ""),  # 4 s
    ],
)
def test_the_cost_model_gives_the_duration_of_a_long_sweep(arguments: dict[str, Any], expected: str) -> None:
    line = plan_view.describe_duration(plan(**{"tokens_per_s": 1000.0, **arguments}))
    assert line.startswith(expected) if expected else line == ""
