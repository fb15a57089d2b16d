"""A Python function as a workload: `sweeper.run(workload=my_function, space={…})`.

Each trial carries the function, packed by cloudpickle, so a worker needs neither the function's module nor its
notebook.
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, make_dataclass
from functools import cache
from numbers import Real
from typing import Any

from workloads.api.contract import Measurement, Rank, Scalar, Workload
from workloads.api.steps import StepReports

VALUE = "value"  # the metric of a function that returns a number
RANK = "rank"  # a parameter with this name receives the rank and is not part of the space
REPORT = "report"  # a parameter with this name receives the function that reports steps
# Values that a function may return in addition to metrics. All rates are derived from these.
RAW_NAMES = ("step_times_s", "tokens_per_step", "flops_per_step", "bytes_per_step", "matrix_dtype", "statistic")


@dataclass(frozen=True)
class FunctionSettings:
    """A packed function. --help explains the keys.

    Attributes:
        name: the function's name.
        digest: a digest of the function's source, because a different function is a different benchmark.
        code: the function, packed by cloudpickle, in base64.
        parameters: the function's parameters that a space may contain.
        defaults: default values, by parameter name.
        takes_rank: whether the function has a parameter `rank`.
        takes_report: whether the function has a parameter `report`; its trials may be pruned.
    """

    name: str
    digest: str
    code: str
    parameters: list[str]
    defaults: dict[str, Scalar] = field(default_factory=dict)
    takes_rank: bool = False
    takes_report: bool = False


@cache
def load_function(code: str) -> Callable[..., Any]:
    """Unpack a function. All trials in a process share one object, which keeps its state between calls."""
    function: Callable[..., Any] = pickle.loads(base64.b64decode(code))
    return function


class StepReport:
    """Reports a function's steps. The function calls `report(value)` or `report({"loss": loss})` after each step.

    Reporting raises an exception in the function after `trial.timeout_s`, or when the pruner ends the trial.
    """

    def __init__(self, function: str, rank: Rank) -> None:
        self._function, self._steps = function, StepReports(rank)

    def __call__(self, metrics: float | Mapping[str, Any]) -> None:
        """Report a finished step with the objective `value`, or with metrics by name. Raises Pruned or TrialTimeout."""
        values = metrics if isinstance(metrics, Mapping) else {VALUE: metrics}
        numbers = {str(name): _number(self._function, "reported", name, value) for name, value in values.items()}
        if ending := self._steps.report(numbers):
            raise ending


class Function(Workload):
    """One call of the function on each rank."""

    name = "function"
    Settings = FunctionSettings
    Parameters: type[Any] = FunctionSettings
    benchmark_version = "function/1"
    max_world_size = None

    def __init__(self, settings: FunctionSettings | None = None) -> None:
        self.settings = settings

    def with_settings(self, settings: FunctionSettings) -> Function:
        """Return the workload for this function. Each parameter has the type of its values in the space."""
        function = Function(settings)
        required = [(name, Any) for name in settings.parameters if name not in settings.defaults]
        optional = [(name, Any, field(default=value)) for name, value in settings.defaults.items()]
        function.Parameters = make_dataclass("FunctionParameters", [*required, *optional], frozen=True)
        function.benchmark_version = f"function/1 {settings.name} {settings.digest}"  # type: ignore[misc]
        function.reports_steps = settings.takes_report  # type: ignore[misc]
        return function

    def run(self, parameters: Any, rank: Rank) -> Measurement:
        """Call the function. Raises TypeError if the function returns neither a number nor a dict of metrics."""
        assert self.settings is not None
        name, executed = self.settings.name, dict(vars(parameters))
        given: dict[str, Any] = {RANK: rank} if self.settings.takes_rank else {}
        given |= {REPORT: StepReport(name, rank)} if self.settings.takes_report else {}
        returned = load_function(self.settings.code)(**executed, **given)
        values = {VALUE: returned} if isinstance(returned, Real) else returned
        if not isinstance(values, Mapping):
            kind = "nothing" if returned is None else f"a {type(returned).__name__}"
            raise TypeError(f"{name} returned {kind}; it has to return a number or a dict of metrics")
        raw: dict[str, Any] = {key: values[key] for key in RAW_NAMES if key in values}
        raw["step_times_s"] = tuple(float(time_s) for time_s in raw.get("step_times_s", ()))
        metrics = {str(key): _number(name, "returned", key, value) for key, value in values.items() if key not in raw}
        return Measurement(executed=executed, metrics=metrics, **raw)


def _number(name: str, verb: str, key: object, value: Any) -> float:
    """Return a metric as a number. A tensor or array with one value is accepted."""
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} {verb} {key}={value!r}, which is not a number") from error
