"""New runs against the history: which series they belong to, what differs if none, and the verdict."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from sweeper.commands.history.record import NewRun
from sweeper.commands.history.reference_file import History, Identity, RecordedRun, Series
from sweeper.results.ranking import describe_differences
from sweeper.results.runs import Comparison, Gate, Verdict, compare_runs
from workloads.api.errors import UserInputError


@dataclass(frozen=True)
class Compared:
    """New runs of one series and the runs that they are compared with."""

    identity: Identity
    earlier: tuple[RecordedRun, ...]
    new: tuple[RecordedRun, ...]
    result: Comparison

    @property
    def changes(self) -> list[str]:
        """The versions in which the last new run differs from the last earlier one."""
        return describe_changes(self.earlier[-1], self.new[-1])


@dataclass(frozen=True)
class Unknown:
    """New runs of work or hardware that the history does not have, and how they differ from the most similar one."""

    identity: Identity
    new: tuple[RecordedRun, ...]
    reason: str


def compare(history: History, runs: Sequence[NewRun], gate: Gate) -> tuple[list[Compared], list[Unknown]]:
    """Compare new runs with the present level of their series, each series by itself."""
    compared, unknown = [], []
    for identity, new in group(runs):
        series = history.find(identity)
        earlier = tuple(run for run in series.level if not any(map(run.is_same, new))) if series else ()
        if earlier:
            before, after = ([run.to_run(identity) for run in side] for side in (earlier, new))
            result = compare_runs(before, after, gate)
            compared.append(Compared(identity, earlier, new, result))
        else:
            unknown.append(Unknown(identity, new, _explain(history, identity, series)))
    return compared, unknown


def append(history: History, runs: Sequence[NewRun], gate: Gate, *, new_level: bool) -> History:
    """Return the history with these runs.

    Raises:
        UserInputError: it has one of them, or one is slower or faster than the level that it would belong to.
    """
    for identity, new in group(runs):
        series = history.find(identity)
        if series and (known := next((run for run in new if any(map(run.is_same, series.runs))), None)):
            raise UserInputError(f"{known.sweep} of {known.date}: already in the history")
        if series and not new_level:
            _check_level(series, new, gate)
        for place, run in enumerate(new):
            starts = bool(series) and new_level and not place
            history = history.append(identity, replace(run, starts_level=starts))
    return history


def group(runs: Sequence[NewRun]) -> list[tuple[Identity, tuple[RecordedRun, ...]]]:
    """Return the runs of each identity, in their order."""
    groups: dict[str, tuple[Identity, tuple[RecordedRun, ...]]] = {}
    for new in runs:
        key = json.dumps(asdict(new.identity), sort_keys=True)
        _, known = groups.get(key, (new.identity, ()))
        groups[key] = new.identity, (*known, new.run)
    return list(groups.values())


def describe_changes(before: RecordedRun, after: RecordedRun) -> list[str]:
    """Return the versions that differ between two runs: `torch 2.11 to 2.12`."""
    names = {**before.versions, **after.versions}
    versions = {name: (before.versions.get(name, "none"), after.versions.get(name, "none")) for name in names}
    return [f"{name} {old} to {new}" for name, (old, new) in versions.items() if old != new]


def _check_level(series: Series, new: Sequence[RecordedRun], gate: Gate) -> None:
    """Refuse runs that would make the level a mixture of two."""
    level, added = ([run.to_run(series.identity) for run in side] for side in (series.level, new))
    result = compare_runs(level, added, gate)
    is_faster = compare_runs(added, level, gate).verdict is Verdict.SLOWER
    if is_faster or result.verdict is Verdict.SLOWER:
        differs = f"{'faster' if is_faster else 'slower'} than the runs before ({result.ratio.value - 1:+.1%})"
        raise UserInputError(
            f"{new[-1].sweep}: {differs}. --new-level starts a new level, with which later runs are compared"
        )


def _explain(history: History, identity: Identity, series: Series | None) -> str:
    """Return why there is nothing to compare with: in what the most similar series differs."""
    if series is not None:
        return "the history has no other run of this work at its present level"
    if not history.series:
        return "the history is empty: `python -m sweeper history append` adds the last sweep"
    differences = [describe_differences(identity.details, known.identity.details) for known in history.series]
    fewest = min(differences, key=len)
    return f"not in the history: {'; '.join(fewest)}"
