"""Several GPUs for one model, side by side: what each takes to train it."""

from dataclasses import replace

from sweeper.commands.plan.answer import find_problem, plan_training, search
from sweeper.commands.plan.request import PlanRequest
from sweeper.commands.plan.text import list_warnings
from sweeper.common.format import round_to_band
from workloads.api.errors import UserInputError
from workloads.estimator.estimate import find_band
from workloads.estimator.search import bound_gib, usable_gib
from workloads.estimator.words import describe

HEADING = ["hardware", "GPUs", "tokens/s per GPU", "within", "days", "GPU-hours", "cost", "MWh", "GiB left", "layout"]
MISSING = "—"
FAILED = (float("inf"),)  # the order of a GPU without a layout: the last


def compare_hardware(request: PlanRequest, names: list[str]) -> tuple[list[list[str]], dict[str, int]]:
    """Return a row for each GPU, in the order of their cost, else of their GPU-hours, and how many warnings each has.

    Energy is that of GPUs at their power caps, without the rest of a machine. A GPU that the request does not fit has
    the reason in its row. Raises UserInputError with the reasons if it fits none, or is wrong for all.
    """
    warnings: dict[str, int] = {}
    rows = [_row(replace(request, hardware=name), warnings) for name in names]
    if all(order == FAILED for order, _ in rows):
        raise UserInputError("\n".join(dict.fromkeys(row[-1] for _, row in rows)))
    ordered = [row for _, row in sorted(rows, key=lambda pair: pair[0])]
    return ordered, {row[0]: number for row in ordered if (number := warnings.get(row[0]))}


def _row(request: PlanRequest, warnings: dict[str, int]) -> tuple[tuple[float, ...], list[str]]:
    try:
        problem, _ = find_problem(request)
        best = search(problem, keep=1).best[0]
        training = plan_training(request, best.estimate)
    except UserInputError as error:
        return FAILED, [request.hardware, *[MISSING] * (len(HEADING) - 2), str(error)]
    device, estimate = problem.cluster.device, best.estimate
    band = find_band(problem.job, problem.cluster)
    share = band.error_share
    rate = estimate.tokens_per_s_per_gpu
    energy_mwh = None if device.power_w is None else training.gpu_hours * device.power_w / 1e6
    figures = (training.days, training.gpu_hours, training.cost, energy_mwh)
    cells = [MISSING if figure is None else round_to_band(figure, share) for figure in figures]
    missing = band.known.missing(problem.job, problem.cluster)
    warnings[request.hardware] = len(missing) + len(list_warnings(problem, best, request.model))
    left_gib = usable_gib(problem.cluster) - bound_gib(estimate.memory, problem.job, problem.cluster)
    rates = [round_to_band(rate, share), f"{share:.0%}"]
    layout = describe(best.layout)
    return (training.cost or 0.0, training.gpu_hours), [
        request.hardware,
        f"{estimate.gpus:,}",
        *rates,
        *cells,
        f"{left_gib:.0f}",
        layout,
    ]
