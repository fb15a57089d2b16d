"""A sweep's result in Python: the winner and a table of the trials, read from the sweep's folder."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sweeper.common.trials import TrialRecord
from sweeper.metrics.intervals import Interval
from sweeper.results.description import read_description
from sweeper.results.stored import StoredSweep
from workloads.api.metrics import METRICS
from workloads.api.validation import find_unit

if TYPE_CHECKING:
    import pandas as pd

SPREAD = re.compile(r"_(ci_low|ci_high|p10|p90)(?=$|_per_gpu$)|_per_gpu$")


class SweepError(Exception):
    """Raised if a sweep ends with no complete trials. The message gives the reason.

    Attributes:
        result: the partial result, or None if the sweep did not start.
    """

    def __init__(self, message: str, result: SweepResult | None = None) -> None:
        super().__init__(message)
        self.result = result


@dataclass(frozen=True)
class BestTrial:
    """The winner of a sweep.

    Attributes:
        trial: the trial's number.
        params: all parameters, including fixed ones.
        value: the objective: the mean over the rounds of the finals, or without finals the trial's own value.
        low, high: the bounds of the 95% interval of `value`; NaN if there is no interval.
        rounds: the number of rounds in the finals; 0 without finals.
        metrics: the trial's metrics in the search.
    """

    trial: int
    params: Mapping[str, Any]
    value: float
    low: float
    high: float
    rounds: int
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class SweepResult:
    """A sweep that has ended.

    Attributes:
        folder: the sweep's folder. `folder / "best"` contains the files for rerunning the winner.
        exit_code: the command's exit code: 0, or 1 if trials failed or the sweep stopped early.
        stopped: why the sweep ended before its budget was used up; empty if it did not end early.
        summary: the output of the command.
    """

    folder: Path
    exit_code: int = 0
    stopped: str = ""
    summary: str = field(default="", repr=False)

    @property
    def name(self) -> str:
        return self.folder.name

    @cached_property
    def _stored(self) -> StoredSweep:
        return StoredSweep(self.folder)

    @property
    def objective(self) -> str:
        """The metric that ranks the trials."""
        return self._stored.description.objective

    def describe_unmet(self) -> str:
        """Describe the limits that no single trial meets, and the nearest trial, or return "" if a trial meets all."""
        return self._stored.description.criteria.describe_unmet(self._stored.records.values())

    @cached_property
    def best(self) -> BestTrial | None:
        """The winner of the finals or, without finals, the best trial; None if no complete trial meets the limits."""
        winner = self._stored.winner
        if winner is None:
            return None
        record = self._stored.records[winner.trial]
        bounds = (winner.value, winner.low, winner.high)
        return BestTrial(winner.trial, record.all_params, *bounds, winner.rounds, dict(record.metrics))

    @cached_property
    def trials(self) -> pd.DataFrame:
        """The search's trials by number: outcome, parameters (`param.…`) and metrics; units are in `attrs["units"]`."""
        return self._tabulate(remeasured=False)

    @cached_property
    def remeasured(self) -> pd.DataFrame:
        """The trials of the finals and node comparisons, with the columns of `trials` and `remeasured_trial`."""
        return self._tabulate(remeasured=True)

    def _tabulate(self, *, remeasured: bool) -> pd.DataFrame:
        import pandas as pd

        rows = []
        records = self._stored.records.items()
        for number, record in sorted(item for item in records if bool(item[1].remeasurement) == remeasured):
            row = {"trial": number, "outcome": record.status.value, "reason": record.reason, **record.repeats}
            rows.append(row | _param_columns(record) | dict(record.metrics))
        return _add_units(pd.DataFrame(rows).set_index("trial") if rows else pd.DataFrame())

    @cached_property
    def front(self) -> pd.DataFrame | None:
        """The front of several objectives, or None if there is only one objective or no trial has a rank.

        There is a row for each remeasured point and for each other point on the front, indexed by trial number. Columns
        are `on_front`, `share`, `verdict`, `same_as` (a tuple of trial numbers), each objective with `…_ci_low` and
        `…_ci_high` (NaN without an interval), and every parameter as `param.…`. `share` is NaN for a point that was
        measured only once. `front.attrs["units"]` has the units.
        """
        import pandas as pd

        if (front := self._stored.front) is None:
            return None
        metrics = self._stored.description.criteria.metrics
        rows = []
        trials = [*(point.trial for point in front.certified), *front.measured_once]
        for record, point in zip_longest(trials, front.certified):
            row = {
                "trial": record.number,
                "on_front": point is None or point.is_on_front,
                "share": point.share if point else math.nan,
                "verdict": point.verdict if point else "measured once",
                "same_as": point.same_as if point else (),
            }
            for name in metrics:
                value = point.values[name] if point else Interval.read(record.metrics, name)
                row |= value.to_metrics(name)
            rows.append(row | _param_columns(record))
        return _add_units(pd.DataFrame(rows).set_index("trial"))

    def __str__(self) -> str:
        return self.summary.strip() or repr(self)

    def _repr_html_(self) -> str:
        from sweeper.notebook.page import build_html

        return build_html(self._stored)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Print the summary with an exclamation mark before each command so that a notebook can run the command."""
        printer.text(re.sub(r"(?m)^(\w+ +)(?=\S*python \S)", r"\1!", str(self)))


def read_result(folder: Path, **outcome: Any) -> SweepResult:
    """Return the result of the sweep in this folder. Raises UserInputError if the folder does not contain a sweep."""
    read_description(folder)  # raises an error if there is none
    return SweepResult(folder, **outcome)


def unit_of_column(column: str) -> str:
    """Return the unit in which a metric or parameter is stored, or an empty string."""
    name = SPREAD.sub("", column.removeprefix("param."))
    if metric := METRICS.get(name):
        return metric.unit if metric.factor == 1.0 else ""  # percentages are stored as fractions
    return find_unit(name)


def _add_units(table: pd.DataFrame) -> pd.DataFrame:
    units = {column: unit_of_column(str(column)) for column in table.columns}
    table.attrs["units"] = {column: unit for column, unit in units.items() if unit}
    return table


def _param_columns(record: TrialRecord) -> dict[str, Any]:
    return {f"param.{name}": value for name, value in record.all_params.items()}
