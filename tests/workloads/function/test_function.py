"""What a function returns becomes a measurement."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

import cloudpickle
import pytest

from sweeper.common.metrics import derive
from workloads.api.contract import Measurement, Rank
from workloads.api.registry import load
from workloads.api.trial import run_trial


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
