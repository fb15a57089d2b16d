"""Compare two sweeps on the work that they have in common."""

import json

from sweeper.preflight.work import SEARCHED
from sweeper.results import comparison, ranking
from sweeper.results.comparison import ComparedWork
from sweeper.results.mlflow_results import Stored
from sweeper.results.runs import Gate
from workloads.api.errors import UserInputError
from workloads.api.validation import check_known


def find_latest_sweep(stored: Stored, first: str) -> str:
    """Return the latest other sweep of the first sweep's workload. Raises UserInputError if there is none."""
    is_first = stored.sweeps["run"] == first
    workloads = set(stored.sweeps.loc[is_first, "tag.workload"]) if is_first.any() else set[str]()
    others = stored.sweeps[~is_first & stored.sweeps["tag.workload"].isin(workloads)] if workloads else stored.sweeps
    if not len(others):
        raise UserInputError(f"{first}: there is no other sweep of its workload to compare with")
    return str(others.sort_values("start")["run"].iloc[-1])


def compare_sweeps(stored: Stored, first: str, second: str, gate: Gate) -> tuple[str, list[ComparedWork]]:
    """Compare each kind of work in two sweeps, per device. Return the comparisons, with a note if the spaces differ.

    Best results from different spaces answer different questions, so such sweeps are compared only at common points.

    Raises UserInputError if a sweep is unknown.
    """
    names = set(stored.sweeps["run"])
    for name in (first, second):
        check_known(name, names, f"{name}: unknown sweep")
    sides = [stored.trials[stored.trials["tag.sweep"] == name] for name in (first, second)]
    note = ""
    if differences := _describe_spaces(stored, first, second):
        sides = comparison.select_common_points(sides)
        remedy = "compared at the points that both measured" if len(sides[0]) else "no point was measured by both"
        note = f"the spaces differ ({differences}): {remedy}"
        if not len(sides[0]):
            return note, []
    first_results, second_results = map(ranking.find_best_results, sides)
    if not first_results:
        return f"{first} has no complete trial to rank", []
    labels = ranking.label_works([result.work for result in (*first_results, *second_results)])
    works: list[ComparedWork] = []
    for result, work_label in zip(first_results, labels, strict=False):  # the rest are the second sweep's labels
        label, metric = f"{work_label} {result.objective.metric}", result.objective.metric
        kind = result.work, result.objective
        same_work = [other for other in second_results if (other.work, other.objective) == kind]
        # Training on a different number of devices is different work, and so is a step.
        if not result.is_rate or metric in ("tokens_per_s", "samples_per_s"):
            same_work = [other for other in same_work if other.devices == result.devices]
        if not same_work:
            reason = f"{second} has no comparable result ({_explain_difference(result, second_results)})"
            works.append(ComparedWork(work=label, device=result.platform, objective=result.objective, detail=reason))
        works += [_compare_results(label, (first, result), (second, other), gate) for other in same_work]
    return note, works


def _compare_results(
    label: str, earlier: tuple[str, ranking.BestResult], new: tuple[str, ranking.BestResult], gate: Gate
) -> ComparedWork:
    sides = [result for _, result in (earlier, new)]
    before, after = (side.per_device for side in sides)
    platforms = list(dict.fromkeys(side.platform for side in sides))
    goal, unit = sides[0].objective, sides[0].unit
    if not min(before.value, after.value) > 0:
        detail = f"{before} and {after}: only values above 0 have a ratio"
        return ComparedWork(work=label, device=" and ".join(platforms), objective=goal, detail=detail)
    unit += " per device" if sides[0].is_rate and max(side.devices for side in sides) > 1 else ""
    compared = comparison.judge([before], [after], gate, less_is_better=goal.direction == "minimize")
    single = "the steps of one trial" if sides[0].is_rate else "one trial"
    bases = [f"{side.rounds} rounds of finals" if side.rounds else single for side in sides[::-1]]
    basis = f"{bases[0]} each" if bases[0] == bases[1] else " against ".join(bases)
    return ComparedWork(
        work=label,
        device=" and ".join(platforms),
        earlier=f"{before} of {earlier[0]}",
        now=f"{after} {unit} of {new[0]}",
        result=compared,
        objective=goal,
        detail=f"from {basis}; {comparison.describe_spread(compared)}",
    )


def _describe_spaces(stored: Stored, first: str, second: str) -> str:
    trials = stored.trials[stored.trials["tag.sweep"].isin([first, second])]
    works = trials.get("tag.work", trials["run"][:0]).dropna().unique()
    work = {name: value for text in works for name, value in json.loads(text).items() if value == SEARCHED}
    rows = (dict(stored.sweeps[stored.sweeps["run"] == name].iloc[-1]) for name in (first, second))
    return "; ".join(ranking.describe_differences(*(ranking.read_space(row, work) for row in rows)))


def _explain_difference(result: ranking.BestResult, others: list[ranking.BestResult]) -> str:
    if not others:
        return "it has no complete trial to rank"
    work, *other_works = ({**side.work, "devices": str(side.devices)} for side in (result, *others))
    differences = [
        ranking.describe_differences(work, other_work)
        or [f"objective to {other.objective.direction} {other.objective.metric}"]
        for other, other_work in zip(others, other_works, strict=True)
    ]
    fewest = min(differences, key=len)
    return "; ".join(fewest)
