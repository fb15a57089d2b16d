"""Compare several GPU models side by side: the time, cost and energy that each needs for a training run."""

import math
from dataclasses import dataclass, replace
from itertools import combinations

from sweeper.commands.plan.answer import Report, find_problem, plan_training, report_nothing, search
from sweeper.commands.plan.request import PlanRequest
from sweeper.commands.plan.text import MISSING, list_warnings, show_cost
from sweeper.common.format import count, round_to_band, show_range
from workloads.api.contract import BandEnds
from workloads.api.errors import UserInputError
from workloads.estimator.estimate import find_band
from workloads.estimator.questions import TrainingRun
from workloads.estimator.search import bound_gib
from workloads.layouts.layout import describe

HEADING = ["hardware", "GPUs", "tokens/s per GPU", "days", "GPU-hours", "cost", "MWh", "GiB left", "trained", "layout"]


@dataclass(frozen=True)
class Planned:
    """A planned run on one GPU model, and its error band."""

    name: str
    training: TrainingRun
    ends: BandEnds
    is_far: bool  # from any measured run
    may_not_fit: bool  # only the estimate of its memory fits, its bound does not


def compare_hardware(
    request: PlanRequest, names: list[str], report: Report = report_nothing
) -> tuple[list[list[str]], list[str]]:
    """Return a row for each GPU model, and lines with prices, open questions and numbers of warnings.

    Rows are ordered by cost, or by GPU-hours if a price is unknown; GPUs on which the run may not fit follow. Energy is
    that of the GPUs at their power caps; it excludes the rest of the machine. If a GPU model cannot run the request,
    its row gives the reason. Raises UserInputError with all reasons if no GPU model can run the request.
    """
    warnings: dict[str, int] = {}
    rows = [_row(replace(request, hardware=name), warnings, report) for name in names]
    planned = [one for one, _ in rows if one]
    if not planned:
        raise UserInputError("\n".join(dict.fromkeys(row[-1] for _, row in rows)))
    has_costs = all(one.training.cost is not None for one in planned)

    def order(planned: Planned | None) -> float:
        return math.inf if planned is None else (has_costs and planned.training.cost) or planned.training.gpu_hours

    rows.sort(key=lambda row: (row[0] is None, row[0] is not None and row[0].may_not_fit, order(row[0])))
    ordered = [row for _, row in rows]
    prices = {name: replace(request, hardware=name).price[1] for name, *_ in ordered if name in warnings}
    lines = [f"price     {name}: {price}" for name, price in prices.items() if price]
    lines += [f"none      {row[0]}: {row[-1]}" for row in ordered if row[1] == MISSING]
    lines += list_open(request, [(order(one), one) for one in sorted(planned, key=order)])
    if total := sum(warnings.values()):
        counts = ", ".join(f"{name} {warnings[name]}" for name in prices if warnings[name])
        where = f"A plan of one GPU lists its own: hardware={names[0]}"
        lines.append(f"unsure    {count(total, 'warning')}: {counts}. {where}")
    return ordered, lines


def list_open(request: PlanRequest, ordered: list[tuple[float, Planned]]) -> list[str]:
    """List the questions that the error bands leave open. `ordered` pairs each plan's sort key with the plan."""
    lines, planned, pairs = [], [one for _, one in ordered], combinations(ordered, 2)
    alike = [f"{a.name} and {b.name}" for (x, a), (y, b) in pairs if x / (1 - a.ends.below) > y / (1 + b.ends.above)]
    if alike:
        lines.append(f"order     open between {', '.join(alike)}: their bands overlap")
    runs = [(one.name, one.training, one.ends) for one in planned]
    days = [
        (f"{name} {show_range(run.days, ends, request.days)}", run.days / (1 - ends.below)) for name, run, ends in runs
    ]
    costs = [
        (f"{name} {show_cost(run, ends, request.max_cost)}", (run.cost or 0.0) / (1 - ends.below))
        for name, run, ends in runs
    ]
    for key, limit, slow_ends in (("days", request.days, days), ("max_cost", request.max_cost, costs)):
        if over := ", ".join(text for text, end in slow_ends if end > (limit or math.inf)):
            lines.append(f"{key:10}{limit:g} is met by the middle of the band, not by its slow end: {over}")
    if unfit := [one.name for one in planned if one.may_not_fit]:
        lines.append(f"memory    it may not fit on {', '.join(unfit)}; GPUs on which it fits come first")
    if far := [one.name for one in planned if one.is_far]:
        lines.append(f"far       {', '.join(far)}: far from any measured run")
    if unpriced := [one.name for one in planned if one.training.cost is None]:
        lines.append(f"price     none is known of {', '.join(unpriced)}; price_per_hour= sets one for all")
    if not (request.trainer or request.file or request.layout):
        lines.append("trainer   this project's own; another one (trainer=megatron) can change rates and order")
    return lines


def _row(request: PlanRequest, warnings: dict[str, int], report: Report) -> tuple[Planned | None, list[str]]:
    try:
        problem, _ = find_problem(request, report)
        best = search(problem, keep=1).best[0]
        band = find_band(problem.job, problem.cluster)
        training = plan_training(request, best.estimate, band.ends)
    except UserInputError as error:
        return None, [request.hardware, *[MISSING] * (len(HEADING) - 2), str(error)]
    job, cluster, estimate = problem.job, problem.cluster, best.estimate
    ends, power_w = band.ends, cluster.device.power_w
    left_gib = cluster.usable_gib - bound_gib(estimate.memory, job, cluster)
    listed, missing = list_warnings(problem, best), band.known.missing(job, cluster)
    warnings[request.hardware] = len(missing) + len(listed)
    return Planned(request.hardware, training, ends, bool(missing), left_gib < 0), [
        request.hardware,
        f"{estimate.gpus:,}",
        show_range(estimate.tokens_per_s_per_gpu, ends, is_rate=True),
        show_range(training.days, ends, request.days),
        round_to_band(training.gpu_hours, ends.half_width),
        show_cost(training, ends, request.max_cost),
        MISSING if power_w is None else round_to_band(training.gpu_hours * power_w / 1e6, ends.half_width),
        f"{left_gib:.0f}",
        f"by {job.trainer}, {job.precision}, {job.layout.global_batch:,} x {job.sequence_length:,} tokens a step",
        describe(best.layout) + " (may not fit)" * (left_gib < 0),
    ]
