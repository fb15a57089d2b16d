"""Read new runs from the MLflow store, one for each kind of work and device, and compare them with the history."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from sweeper.commands.history.reference_file import History, Identity, RecordedRun, round_value
from sweeper.results import ranking
from sweeper.results.comparison import find_change, word_verdict
from sweeper.results.mlflow_results import Stored
from sweeper.results.runs import Comparison, Gate, Verdict, compare_runs, run_of_interval
from workloads.api.errors import UserInputError
from workloads.suggestions import suggest

VERSION_TAG = "tag.version."
UNFINISHED = {"RUNNING": "runs, or was killed", "KILLED": "was interrupted"}  # by MLflow run status


@dataclass(frozen=True)
class NewRun:
    """A run of a sweep, and the identity of the series to which it belongs."""

    identity: Identity
    run: RecordedRun


@dataclass(frozen=True)
class Compared:
    """New runs of one series, compared with the earlier runs of the series."""

    identity: Identity
    new: tuple[RecordedRun, ...]
    earlier: tuple[RecordedRun, ...]
    result: Comparison | None = None  # None if there are no earlier runs
    reason: str = ""  # why there are no earlier runs, such as differences from the most similar work


def read_runs(stored: Stored, names: Sequence[str]) -> list[NewRun]:
    """Return the runs of these sweeps, by default the last. Raises UserInputError if a sweep has no complete trial."""
    sweeps = stored.sweeps.sort_values("start")
    if not len(sweeps):
        raise UserInputError("the store has no sweep")
    known = list(sweeps["run"])
    for name in names:
        if name not in known:
            raise UserInputError(f"{name}: unknown sweep. {suggest(name, known)}")
    runs = []
    for sweep in (sweeps[sweeps["run"].isin(names)] if names else sweeps.tail(1)).to_dict("records"):
        if reason := UNFINISHED.get(sweep["status"]):
            raise UserInputError(f"{sweep['run']}: the sweep {reason}: its command resumes it")
        trials = stored.trials
        results = ranking.find_best_results(
            trials[trials["tag.sweeper.study"] == sweep["tag.sweeper.study"]] if len(trials) else trials
        )
        if not results:
            raise UserInputError(f"{sweep['run']}: the sweep has no complete trial to rank")
        if unfit := next((result for result in results if not result.estimate.value > 0), None):
            value, name = unfit.estimate.value, unfit.objective.metric
            raise UserInputError(f"{sweep['run']}: {name} is {value:g}. A history compares only values above 0")
        runs += [_build_run(sweep, result) for result in results]
    return runs


def _build_run(sweep: dict[Any, Any], result: ranking.BestResult) -> NewRun:
    identity = Identity(
        metric=result.objective.metric,
        unit=result.unit,
        direction="minimize" if result.objective.direction == "minimize" else "maximize",
        work={**result.work, **ranking.read_space(sweep, result.work)},  # results compare only in equal spaces
        device=result.device,
        devices=result.devices,
        basis="finals" if result.rounds else "single trial",
    )
    # A tag of a resumed sweep may have several values, one per line. Sweeps before 0.2 did not record the driver.
    tags = {str(key): ", ".join(value.splitlines()) for key, value in sweep.items() if isinstance(value, str)}
    versions = {key.removeprefix(VERSION_TAG): text for key, text in tags.items() if key.startswith(VERSION_TAG)}
    versions["driver"] = tags.get("tag.driver", "")
    point = {key: result.trial[f"param.{key}"] for key in ranking.list_varying_parameters(result.trials)}
    low, high = (round_value(bound) if result.estimate.has_interval else None for bound in result.estimate.bounds[1:])
    run = RecordedRun(
        sweep=sweep["run"],
        date=sweep["start"].strftime("%Y-%m-%dT%H:%M:%SZ"),
        value=round_value(result.estimate.value),
        low=low,
        high=high,
        point={key: value for key, value in point.items() if isinstance(value, str)},
        versions={key: version for key, version in sorted(versions.items()) if version},
        commit=tags.get("tag.git_commit", "")[-40:][:12],  # the last commit, whose full hash has 40 digits
    )
    return NewRun(identity, run)


def compare(history: History, runs: Sequence[NewRun], gate: Gate) -> list[Compared]:
    """Compare the new runs of each series with the current level of the series. Series without a level come last."""
    compared = []
    for identity, new in _group(runs):
        series = history.find(identity)
        earlier = tuple(run for run in series.level if not any(map(run.is_same, new))) if series else ()
        if earlier:
            compared.append(Compared(identity, new, earlier, _compare(identity, earlier, new, gate)))
            continue
        reason = "the history is empty: `python -m sweeper history append` adds the last sweep"
        if series:
            reason = "the history has no other run of this work at its present level"
        elif history.series:
            known = [ranking.describe_differences(identity.details, one.identity.details) for one in history.series]
            closest = min(known, key=len)
            reason = f"not in the history: {'; '.join(closest)}"
        compared.append(Compared(identity, new, (), reason=reason))
    return sorted(compared, key=lambda item: item.result is None)


def append(history: History, runs: Sequence[NewRun], gate: Gate, *, new_level: bool) -> History:
    """Return the history with these runs added.

    Raises UserInputError if a run is already in the history, or if new runs are slower or faster than their level,
    or worse or better.
    """
    for identity, new in _group(runs):
        series = history.find(identity)
        if series and (known := next((run for run in new if any(map(run.is_same, series.runs))), None)):
            raise UserInputError(f"{known.sweep} of {known.date}: already in the history")
        if series and not new_level:
            result = _compare(identity, series.level, new, gate)
            if result.verdict in (Verdict.FASTER, Verdict.SLOWER):  # the level would mix two values
                verdict = word_verdict(result.verdict, identity.objective)
                change = find_change(result, identity.objective).value - 1
                raise UserInputError(
                    f"{new[-1].sweep}: {verdict} than the runs before ({change:+.1%}). --new-level starts a new "
                    "level, with which later runs are compared"
                )
        for place, run in enumerate(new):
            history = history.append(identity, replace(run, starts_level=bool(series) and new_level and not place))
    return history


def _group(runs: Sequence[NewRun]) -> list[tuple[Identity, tuple[RecordedRun, ...]]]:
    identities: list[Identity] = []
    for new in runs:
        if new.identity not in identities:
            identities.append(new.identity)
    return [(identity, tuple(new.run for new in runs if new.identity == identity)) for identity in identities]


def _compare(identity: Identity, earlier: Sequence[RecordedRun], new: Sequence[RecordedRun], gate: Gate) -> Comparison:
    read = partial(run_of_interval, less_is_better=identity.direction == "minimize")
    before, after = ([read(*run.interval.bounds) for run in side] for side in (earlier, new))
    return compare_runs(before, after, gate)
