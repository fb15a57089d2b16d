"""Compare several GPU models side by side: the time, cost and energy that each needs for a training run."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from sweeper.commands.plan.answer import Report, find_problem, plan_training, report_nothing, search
from sweeper.commands.plan.request import PlanRequest
from sweeper.commands.plan.text import MISSING, list_warnings
from sweeper.common.format import count, round_to_band, show_range
from sweeper.common.grouping import group_values
from workloads.api.contract import BandEnds
from workloads.api.errors import UserInputError
from workloads.estimator.estimate import find_band
from workloads.estimator.questions import TrainingRun
from workloads.estimator.search import bound_gib
from workloads.layouts.layout import describe

# In the order of importance, because a narrow terminal hides the last columns.
HEADING = ["hardware", "GPUs", "days", "cost", "tokens/s per GPU", "GPU-hours", "GiB left", "MWh", "trained", "layout"]
SHOWN_COLUMNS = 4  # on the narrowest terminal


@dataclass(frozen=True)
class Planned:
    """A planned run on one GPU model, and its error band."""

    name: str
    training: TrainingRun
    ends: BandEnds
    is_far: bool  # from any measured run
    may_not_fit: bool  # only the estimate of its memory fits, its bound does not
    row: Sequence[str] = ()
    price: str = ""  # of a GPU-hour, and its source
    warnings: int = 0
    trainer: str = ""


def compare_hardware(
    request: PlanRequest, names: list[str], report: Report = report_nothing
) -> tuple[list[Sequence[str]], list[str]]:
    """Return a row for each GPU model, and lines with prices, open questions and numbers of warnings.

    Rows are ordered by cost, or by GPU-hours if a price is unknown; GPUs on which the run may not fit follow. Energy is
    that of the GPUs at their power caps; it excludes the rest of the machine. If a GPU model cannot run the request,
    its row gives the reason. Raises UserInputError with all reasons if no GPU model can run the request.
    """
    planned, refused = list[Planned](), dict[str, str]()
    for name in names:
        try:
            planned.append(_plan(replace(request, hardware=name), report))
        except UserInputError as error:
            refused[name] = str(error)
    if not planned:
        reasons = group_values((reason, name) for name, reason in refused.items())
        named = [f"{', '.join(same)}: {reason}" for reason, same in reasons.items()]
        raise UserInputError("\n".join(named if len(reasons) > 1 else reasons))
    has_costs = all(one.training.cost is not None for one in planned)

    def order(planned: Planned) -> float:
        return (has_costs and planned.training.cost) or planned.training.gpu_hours

    planned.sort(key=lambda one: (one.may_not_fit, order(one)))
    lines = [f"price     {one.name}: {one.price}" for one in planned if one.price]
    lines += [f"none      {name}: {reason}" for name, reason in refused.items()]
    lines += list_open(request, [(order(one), one) for one in sorted(planned, key=order)])
    if total := sum(one.warnings for one in planned):
        counts = ", ".join(f"{one.name} {one.warnings}" for one in planned if one.warnings)
        where = f"A plan of one GPU lists its own: hardware={names[0]}"
        lines.append(f"unsure    {count(total, 'warning')}: {counts}. {where}")
    empty = [MISSING] * (len(HEADING) - 2)
    return [*(one.row for one in planned), *([name, *empty, reason] for name, reason in refused.items())], lines


def list_open(request: PlanRequest, ordered: list[tuple[float, Planned]]) -> list[str]:
    """List the questions that the error bands leave open. `ordered` pairs each plan's sort key with the plan."""
    lines, planned, pairs = [], [one for _, one in ordered], combinations(ordered, 2)
    alike = [f"{a.name} and {b.name}" for (x, a), (y, b) in pairs if x / (1 - a.ends.below) > y / (1 + b.ends.above)]
    if alike:
        quantity = "cost" if all(one.training.cost is not None for one in planned) else "GPU-hours"
        lines.append(f"order     by {quantity}; open between {', '.join(alike)}: their bands overlap")
    for key, name, limit in (("days", "days", request.days), ("max_cost", "cost", request.max_cost)):
        values = [(one, getattr(one.training, name) or 0.0) for one in planned if limit is not None]
        over = [(one, value) for one, value in values if value / (1 - one.ends.below) > (limit or 0.0)]
        if slow_ends := ", ".join(f"{one.name} {show_range(value, one.ends, limit)}" for one, value in over):
            lines.append(f"{key:10}{limit:g} is met by the middle of the band, not by its slow end: {slow_ends}")
    if unfit := [one.name for one in planned if one.may_not_fit]:
        lines.append(f"memory    it may not fit on {', '.join(unfit)}; GPUs on which it fits come first")
    if far := [one.name for one in planned if one.is_far]:
        lines.append(f"far       {', '.join(far)}: far from any measured run")
    if unpriced := [one.name for one in planned if one.training.cost is None]:
        lines.append(f"price     none is known of {', '.join(unpriced)}; price_per_hour= sets one for all")
    if not (request.trainer or request.file or request.layout):
        trainers = " and ".join(dict.fromkeys(one.trainer for one in planned))
        lines.append(f"trainer   {trainers} by default; another one (trainer=) can change rates and order")
    return lines


def _plan(request: PlanRequest, report: Report) -> Planned:
    problem, _ = find_problem(request, report)
    best = search(problem, keep=1).best[0]
    band = find_band(problem.job, problem.cluster)
    training = plan_training(request, best.estimate, band.ends)
    job, cluster, estimate = problem.job, problem.cluster, best.estimate
    ends, power_w = band.ends, cluster.device.power_w
    left_gib = cluster.usable_gib - bound_gib(estimate.memory, job, cluster)
    missing = band.known.missing(job, cluster)
    row = [
        request.hardware,
        f"{estimate.gpus:,}",
        show_range(training.days, ends, request.days),
        MISSING if training.cost is None else show_range(training.cost, ends, request.max_cost),
        show_range(estimate.tokens_per_s_per_gpu, ends, is_rate=True),
        round_to_band(training.gpu_hours, ends.half_width),
        f"{left_gib:.0f}",
        MISSING if power_w is None else round_to_band(training.gpu_hours * power_w / 1e6, ends.half_width),
        f"by {job.trainer}, {job.precision}, {job.layout.global_batch:,} x {job.sequence_length:,} tokens a step",
        describe(best.layout) + " (may not fit)" * (left_gib < 0),
    ]
    warnings = len(missing) + len(list_warnings(problem, best))
    price = request.price[1]
    return Planned(request.hardware, training, ends, bool(missing), left_gib < 0, row, price, warnings, job.trainer)
