"""Read new runs from the MLflow store, one for each kind of work and device, and compare them with the history."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from sweeper.commands.history.output import describe_level, label_series
from sweeper.commands.history.reference_file import History, Identity, RecordedRun, round_value
from sweeper.results import ranking
from sweeper.results.comparison import ComparedWork, describe_spread, find_change, judge, word_verdict
from sweeper.results.mlflow_results import Stored
from sweeper.results.runs import Comparison, Gate, Verdict
from workloads.api.errors import UserInputError
from workloads.api.validation import check_known

VERSION_TAG = "tag.version."
UNFINISHED = {"RUNNING": "runs, or was killed", "KILLED": "was interrupted"}  # by MLflow run status


@dataclass(frozen=True)
class NewRun:
    """A run of a sweep, and the identity of the series to which it belongs."""

    identity: Identity
    run: RecordedRun


def read_runs(stored: Stored, names: Sequence[str]) -> list[NewRun]:
    """Return the runs of these sweeps, by default the last. Raises UserInputError if a sweep has no complete trial."""
    sweeps = stored.sweeps.sort_values("start")
    if not len(sweeps):
        raise UserInputError("the store has no sweep")
    known = list(sweeps["run"])
    for name in names:
        check_known(name, known, f"{name}: unknown sweep")
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


def compare(history: History, runs: Sequence[NewRun], gate: Gate) -> list[ComparedWork]:
    """Compare the new runs of each series with the current level of the series. Series without a level come last."""
    groups = _group(runs)
    works = []
    for (identity, new), label in zip(groups, label_series([identity for identity, _ in groups]), strict=True):
        series = history.find(identity)
        earlier = [run for run in series.level if not any(map(run.is_same, new))] if series else []
        result = _compare(identity, earlier, new, gate) if earlier else None
        works.append(
            ComparedWork(
                work=label,
                device=identity.hardware,
                objective=identity.objective,
                now=describe_level(identity, new),
                earlier=describe_level(identity, earlier) if earlier else "",
                result=result,
                detail=describe_spread(result) if result else _explain_absence(history, identity),
                changed=", ".join(new[-1].list_changes(earlier[-1])) if earlier else "",
            )
        )
    return sorted(works, key=lambda work: work.result is None)


def _explain_absence(history: History, identity: Identity) -> str:
    """Return why there are no earlier runs, such as differences from the most similar work."""
    if history.find(identity):
        return "the history has no other run of this work at its present level"
    if not history.series:
        return "the history is empty: `python -m sweeper history append` adds the last sweep"
    known = [ranking.describe_differences(identity.details, one.identity.details) for one in history.series]
    closest = min(known, key=len)
    return f"not in the history: {'; '.join(closest)}"


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
                remedy = "--new-level starts a new level, with which later runs are compared"
                raise UserInputError(f"{new[-1].sweep}: {verdict} than the runs before ({change:+.1%}). {remedy}")
        for place, run in enumerate(new):
            history = history.append(identity, replace(run, starts_level=bool(series) and new_level and not place))
    return history


def _group(runs: Sequence[NewRun]) -> list[tuple[Identity, list[RecordedRun]]]:
    identities = [new.identity for new in runs]
    distinct = [identity for place, identity in enumerate(identities) if identity not in identities[:place]]
    return [(identity, [new.run for new in runs if new.identity == identity]) for identity in distinct]


def _compare(identity: Identity, earlier: Sequence[RecordedRun], new: Sequence[RecordedRun], gate: Gate) -> Comparison:
    before, after = ([run.interval for run in side] for side in (earlier, new))
    return judge(before, after, gate, less_is_better=identity.direction == "minimize")
