"""What a function returns becomes a measurement."""

import base64
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import cloudpickle
import pytest

from sweeper.metrics.derivation import derive
from workloads.api.contract import Measurement, Pruned, Rank, TrialTimeout
from workloads.api.registry import load
from workloads.api.trial import run_trial
from workloads.function import StepReport


def run(function: Callable[..., Any], *, takes_rank: bool = False, **parameters: Any) -> Measurement:
    settings = {
        "name": "f",
        "digest": "0",
        "code": base64.b64encode(cloudpickle.dumps(function)).decode(),
        "parameters": list(parameters),
        "takes_rank": takes_rank,
    }
    return run_trial("function", parameters, Rank(rank=1, world_size=2), settings)


def test_a_number_is_the_metric_value_and_a_dict_has_its_own() -> None:
    assert run(lambda x: 2 * x, x=3).metrics == {"value": 6.0}
    assert run(lambda x, rank: {"loss": x + rank.rank}, takes_rank=True, x=0.5).metrics == {"loss": 1.5}
    assert run(lambda **every: len(every), x=1, y=None).executed == {"x": 1, "y": None}


@dataclass
class Reporter:
    """Prunes a trial at a step."""

    prune_at: int = 10**9
    reported: list[tuple[int, Mapping[str, float]]] = field(default_factory=list)

    def report(self, step: int, metrics: Mapping[str, float]) -> bool:
        self.reported.append((step, metrics))
        return step >= self.prune_at

    def finish(self) -> None: ...

    def is_finished(self) -> bool:
        return False


def train(steps: int, report: Any) -> float:
    for step in range(steps):
        report({"loss": 1 / (step + 1)} if step else 7)
    return 1.0


def run_steps(reporter: Reporter | None, **given: Any) -> Measurement:
    code = base64.b64encode(cloudpickle.dumps(train)).decode()
    settings = {"name": "train", "digest": "0", "code": code, "parameters": ["steps"], "takes_report": True}
    return run_trial("function", {"steps": 3}, Rank(reporter=reporter, **given), settings)


def test_a_function_reports_its_steps_and_is_ended_by_the_pruner() -> None:
    reporter = Reporter()
    assert run_steps(reporter).metrics == {"value": 1.0} and run_steps(None).executed == {"steps": 3}
    assert reporter.reported == [(1, {"value": 7.0}), (2, {"loss": 0.5}), (3, {"loss": 1 / 3})]
    pruned = Reporter(prune_at=2)
    with pytest.raises(Pruned):
        run_steps(pruned)
    assert len(pruned.reported) == 2
    with pytest.raises(TrialTimeout, match=r"trial\.timeout_s=0"):
        run_steps(Reporter(), timeout_s=0.0)


def test_a_step_that_is_no_number_is_refused() -> None:
    with pytest.raises(TypeError, match="f reported loss='low', which is not a number"):
        StepReport("f", Rank())({"loss": "low"})


def test_rates_are_derived_from_step_times_and_counts() -> None:
    returned = {"step_times_s": [0.5, 0.5, 0.5], "tokens_per_step": 1000, "loss": 2}
    metrics = derive([run(lambda: returned)], {})
    assert metrics["tokens_per_s"] == 2000 and metrics["loss"] == 2 and metrics["steps"] == 3


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, "f returned nothing; it has to return a number or a dict of metrics"),
        ("fast", "f returned a str; it has to return"),
        ({"loss": "low"}, "f returned loss='low', which is not a number"),
    ],
)
def test_what_is_no_metric_is_refused(returned: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        run(lambda: returned)


def test_a_derived_metric_is_not_taken_from_a_function() -> None:
    with pytest.raises(ValueError, match="tokens_per_s is derived from step_times_s and tokens_per_step"):
        run(lambda: {"tokens_per_s": 1e6})


def test_another_function_is_another_benchmark() -> None:
    workload: Any = load("function")
    first, second = (
        workload.with_settings(workload.Settings(name="f", digest=digest, code="", parameters=["x"], defaults={"y": 2}))
        for digest in "ab"
    )
    assert first.benchmark_version != second.benchmark_version == "function/1 f b"
    assert first.Parameters(x=1).y == 2 and workload.settings is None
