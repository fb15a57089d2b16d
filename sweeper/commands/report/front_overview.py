"""The report's first paragraph on a sweep with several objectives: which trials are best in what, and how sure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from sweeper.commands.report.fronts import SweepFront
from sweeper.common.format import count, format_number, format_point
from sweeper.common.trials import TrialRecord
from sweeper.pages.trial_tables import varying_parameters
from workloads.api.metrics import get_metric


def describe_front(front: SweepFront) -> str:
    """Return the front in two or three sentences; no word of a fastest trial, which need not be the one to take."""
    trials, metrics = front.front.trials, front.criteria.metrics
    names = f"{'both ' if len(metrics) == 2 else ''}{', '.join(metrics[:-1])} and {metrics[-1]}"
    if not trials:
        return f"No trial of {front.sweep} is on the front of {names}: all are beyond a limit by the finals."
    if len(trials) == 1:
        first = f"One trial of {front.sweep} is at least as good as every other in {names}: "
        return f"{first}{_describe_trial(trials[0], front)}. {_describe_certainty(front)}"
    first = (
        f"No trial of {front.sweep} is the best in {names}: {len(trials)} of "
        f"{count(len(front.records), 'ranked trial')} are on the front, and which one to take is a choice."
    )
    return f"{first} {_describe_extremes(trials, front)} {_describe_certainty(front)}"


def _describe_extremes(trials: Sequence[TrialRecord], front: SweepFront) -> str:
    """Return the trials of the front that are best in each objective."""
    best: dict[int, list[str]] = {}
    for goal in front.criteria.objectives:
        losses = {trial.number: goal.loss(_value(trial, goal.metric, front)) for trial in trials}
        best.setdefault(min(losses, key=losses.__getitem__), []).append(goal.metric)
    by_number = {trial.number: trial for trial in trials}
    parts = [f"{' and '.join(names)}: {_describe_trial(by_number[number], front)}" for number, names in best.items()]
    return f"Best in {'; in '.join(parts)}."


def _describe_trial(trial: TrialRecord, front: SweepFront) -> str:
    searched = varying_parameters(front.records)
    point = format_point({name: trial.params[name] for name in searched}) if searched else "the only configuration"
    values = []
    for metric in front.criteria.metrics:
        row = get_metric(metric)
        value = format_number(row.factor * _value(trial, metric, front))
        values.append(f"{row.label or row.name} {value} {row.unit}".strip())
    return f"trial {trial.number} ({point}) with {', '.join(values)}"


def _value(trial: TrialRecord, metric: str, front: SweepFront) -> float:
    """Return an objective of a trial: the mean of its rounds in the finals, else the search's measurement."""
    points = {point.trial.number: point for point in front.front.certified}
    return points[trial.number].values[metric].value if trial.number in points else trial.metrics[metric]


def _describe_certainty(front: SweepFront) -> str:
    certified = front.front.certified
    if not certified:
        return "Each was measured once, so the front is not certified."
    verdicts = Counter("beyond a limit" if point.exceeded else point.verdict for point in certified)
    found = ", ".join(f"{number} {verdict}" for verdict, number in verdicts.items())
    return f"Of {count(len(certified), 'trial')} measured again in {certified[0].rounds} rounds: {found}."
