"""Write the report's first paragraphs: the measurements, the winner or front, its certainty, and its performance.

With several objectives, the text does not name the fastest trial, because it is not necessarily the best choice.
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pandas as pd

from sweeper.commands.report.fronts import SweepFront
from sweeper.common.clock import SECONDS_PER_HOUR
from sweeper.common.format import DOUBTFUL, TIE, count, format_interval, format_number, format_percent, format_point
from sweeper.metrics.derivation import MEMORY_METRICS
from sweeper.results.mlflow_results import Stored
from sweeper.results.ranking import BestResult, list_varying_parameters, rank_losses, read_value


def describe(stored: Stored, fronts: Sequence[SweepFront] = ()) -> str:
    """Return one paragraph per line: for each workload, the front or best result of the latest sweep with a result.
    There is no overall winner across workloads. If there is only one workload, everything is in one paragraph."""
    parts = []
    if len(stored.sweeps):
        names, devices = (
            " and ".join(dict.fromkeys(stored.sweeps[column].dropna())) if column in stored.sweeps else ""
            for column in ("tag.workload", "tag.device")
        )
        outcomes = Counter(stored.trials["tag.outcome"] if len(stored.trials) else [])
        counts = ", ".join(f"{number} {outcome}" for outcome, number in outcomes.most_common())
        what = f"{count(len(stored.sweeps), 'sweep')} of {names}" + (f" on {devices}" if devices else "")
        parts.append(f"{what} tried {count(len(stored.trials), 'trial')} ({counts})")
    if len(stored.imported):
        parts.append(f"{count(len(stored.imported), 'result')} of other tools were imported, which are not ranked")
    sentences = [f"{'; '.join(parts)}."]
    sweeps = stored.sweeps.sort_values("start").to_dict("records") if len(stored.sweeps) else []
    studies = [sweep["tag.sweeper.study"] for sweep in sweeps]
    workloads = {sweep["tag.sweeper.study"]: sweep.get("tag.workload") for sweep in sweeps}
    # With several kinds of work in a sweep, such as dtypes, use the winner of the finals, else the best result.
    best_results = sorted(stored.best_results, key=lambda r: (r.rounds > 0, -r.objective.loss(r.estimate.value)))
    found: dict[str, BestResult | SweepFront] = {r.trial["tag.sweeper.study"]: r for r in best_results}
    found |= {front.study: front for front in fronts}
    latest: dict[Any, str] = {}
    for study in sorted(found, key=studies.index):
        if isinstance(best := found[study], BestResult):
            sentence = " ".join(filter(None, [_describe_winner(best, stored), _describe_use(best)]))
        else:
            sentence = _describe_front(best)
        latest[workloads[study]] = sentence
    if len(latest) > 1:
        return "\n".join([*sentences, *(f"{workload}: {headline}" for workload, headline in latest.items())])
    return " ".join([*sentences, *latest.values()])


def _describe_winner(result: BestResult, stored: Stored) -> str:
    names = list_varying_parameters(_select(stored.trials, result))
    estimate = result.estimate
    method = f"mean of {result.rounds} rounds of the finals" if result.rounds else "a single trial"
    interval = f"95% {format_interval(estimate.low, estimate.high)}, " if estimate.has_interval else ""
    sweeps = (stored.sweeps["tag.workload"] == result.work.get("workload")).sum()
    where = f"In the sweep {result.trial['tag.sweep']}, on" if sweeps > 1 else "On"
    place = "fastest" if result.is_rate else f"best {result.objective.metric}"
    return (
        f"{where} {result.platform} the {place} is {_format_point(result.trial, names)} with "
        f"{format_number(estimate.value)} {result.unit} ({interval}{method})"
        f"{_describe_lead(result, names, stored)}."
    )


def _describe_lead(result: BestResult, names: list[str], stored: Stored) -> str:
    others = _select(result.trials[result.trials.index != result.trial.name], result)
    goal, estimate = result.objective, result.estimate
    column = f"metric.final_{goal.metric}"
    if result.rounds:
        losses = others[column].astype(float).map(goal.loss) if column in others else pd.Series(dtype=float)
    else:
        losses = rank_losses(others, goal)
    losses = losses[losses < (0 if result.is_rate else math.inf)]
    if not len(losses):
        return ""
    second = others.iloc[others.index.get_loc(losses.idxmin())]
    in_finals = result.rounds or losses.min() == read_value(second, f"final_{goal.metric}").value * goal.loss(1.0)
    value = read_value(second, f"final_{goal.metric}" if in_finals else goal.metric)
    lead = f", ahead of {_format_point(second, names)} with {format_number(value.value)}"
    if result.is_rate:
        lead = f", {100 * (estimate.value / value.value - 1):.1f}% ahead of {_format_point(second, names)}"
    if result.rounds:
        verdicts = _select(stored.sweeps, result).get("tag.winner", pd.Series(dtype=str)).dropna()
        is_tie = any(str(verdict).startswith(TIE) for verdict in verdicts)
        doubt = ", of rounds that differ by more than noise" if verdicts.str.contains(DOUBTFUL).any() else ""
        return f"{lead}; the finals {'call it a tie' if is_tie else 'confirm it'}{doubt}"
    if not (estimate.has_interval and value.has_interval):
        return f"{lead}, of unknown certainty: there are no intervals to compare"
    are_disjoint = value.high < estimate.low or estimate.high < value.low
    return lead + (", with disjoint intervals" if are_disjoint else ", but their intervals overlap")


def _select(runs: pd.DataFrame, result: BestResult) -> pd.DataFrame:
    return runs[runs["tag.sweeper.study"] == result.trial["tag.sweeper.study"]]


def _describe_use(result: BestResult) -> str:
    hours = 1e9 / result.get_metric("tokens_per_s") / SECONDS_PER_HOUR
    texts = {
        "takes {} ms a step": format_number(result.get_metric("step_time_ms")),
        "reaches {}% of the dense peak (MFU)": format_percent(result.get_metric("mfu")),
        "needs {} GiB of a device's memory": format_number(result.get_first_metric(MEMORY_METRICS)),
        f"trains 10^9 tokens in {{}} hours on {result.platform}": format_number(hours),
    }
    facts = [text.format(value) for text, value in texts.items() if value]
    return f"Run so, it {' and '.join(filter(None, [', '.join(facts[:-1]), facts[-1]]))}." if facts else ""


def _format_point(trial: Any, names: list[str]) -> str:
    values = {name: value for name in names if not pd.isna(value := trial.get(f"param.{name}"))}
    return format_point(values) if names else "the only configuration"


def _describe_front(front: SweepFront) -> str:
    trials, metrics, certified = front.front.trials, front.criteria.metrics, front.front.certified
    names = f"{', '.join(metrics[:-1])} and {metrics[-1]}"
    if not trials:
        return f"No trial of {front.sweep} is on the front of {names}: all are beyond a limit by the finals."
    sureness = "Each was measured once, so the front is not certified."
    if certified:
        verdicts = Counter("beyond a limit" if point.exceeded else point.verdict for point in certified)
        found = ", ".join(f"{number} {verdict}" for verdict, number in verdicts.items())
        sureness = f"Of {count(len(certified), 'trial')} measured again in {certified[0].rounds} rounds: {found}."
    on_front = f"{len(trials)} of {count(len(front.records), 'ranked trial')}"
    return f"{on_front} of {front.sweep} {'is' if len(trials) == 1 else 'are'} on the front of {names}. {sureness}"
