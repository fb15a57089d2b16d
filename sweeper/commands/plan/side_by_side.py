"""Several GPUs for one model, side by side: what each takes to train it."""

import math
from dataclasses import replace

from sweeper.commands.plan.answer import find_problem, plan_training, search
from sweeper.commands.plan.request import PlanRequest
from sweeper.commands.plan.text import MISSING, list_warnings, show_cost, show_range
from sweeper.common.format import count, round_to_band
from workloads.api.errors import UserInputError
from workloads.estimator.estimate import find_band
from workloads.estimator.questions import TrainingRun
from workloads.estimator.search import bound_gib, usable_gib
from workloads.estimator.words import describe

HEADING = ["hardware", "GPUs", "tokens/s per GPU", "days", "GPU-hours", "cost", "MWh", "GiB left", "trained", "layout"]


def compare_hardware(request: PlanRequest, names: list[str]) -> tuple[list[list[str]], list[str]]:
    """Return a row for each GPU, the lines of their prices, and one that counts the warnings of their plans.

    The order is that of costs, or of GPU-hours if a price is not known. Energy is that of GPUs at their power caps,
    without the rest of a machine. A GPU that the request does not fit has the reason in its row. Raises UserInputError
    with the reasons if it fits none, or is wrong for all.
    """
    warnings: dict[str, int] = {}
    rows = [_row(replace(request, hardware=name), warnings) for name in names]
    planned = [training for training, _ in rows if training]
    if not planned:
        raise UserInputError("\n".join(dict.fromkeys(row[-1] for _, row in rows)))
    has_costs = all(training.cost is not None for training in planned)
    orders = [(has_costs and run.cost) or run.gpu_hours if run else math.inf for run, _ in rows]
    ordered = [row for _, (_, row) in sorted(zip(orders, rows, strict=True), key=lambda pair: pair[0])]
    prices = {name: replace(request, hardware=name).price[1] for name, *_ in ordered if name in warnings}
    lines = [f"price     {name}: {price}" for name, price in prices.items() if price]
    if total := sum(warnings.values()):
        counts = ", ".join(f"{name} {warnings[name]}" for name in prices if warnings[name])
        where = f"A plan of one GPU lists its own: hardware={names[0]}"
        lines.append(f"unsure    {count(total, 'warning')}: {counts}. {where}")
    return ordered, lines


def _row(request: PlanRequest, warnings: dict[str, int]) -> tuple[TrainingRun | None, list[str]]:
    try:
        problem, _ = find_problem(request)
        best = search(problem, keep=1).best[0]
        training = plan_training(request, best.estimate)
    except UserInputError as error:
        return None, [request.hardware, *[MISSING] * (len(HEADING) - 2), str(error)]
    job, cluster, estimate = problem.job, problem.cluster, best.estimate
    band = find_band(job, cluster)
    share, power_w = band.error_share, cluster.device.power_w
    left_gib = usable_gib(cluster) - bound_gib(estimate.memory, job, cluster)
    listed = list_warnings(problem, best, request.model)
    warnings[request.hardware] = len(band.known.missing(job, cluster)) + len(listed)
    return training, [
        request.hardware,
        f"{estimate.gpus:,}",
        f"{round_to_band(estimate.tokens_per_s_per_gpu, share)} ±{share:.0%}",
        show_range(training.days, share),
        round_to_band(training.gpu_hours, share),
        show_cost(training, share),
        MISSING if power_w is None else round_to_band(training.gpu_hours * power_w / 1e6, share),
        f"{left_gib:.0f}",
        f"by {job.trainer}, {job.precision}, {job.layout.global_batch:,} x {job.sequence_length:,} tokens a step",
        describe(best.layout) + " (may not fit)" * (left_gib < 0),
    ]
