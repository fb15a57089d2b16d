"""Show a sweep's plan as text: devices, search, duration, estimates, and a projection to more nodes."""

import math
from collections.abc import Mapping, Sequence

from rich.console import Console

from sweeper.common.clock import SECONDS_PER_DAY, SECONDS_PER_HOUR
from sweeper.common.format import count, format_duration, format_point, printable, round_to_band
from sweeper.common.trials import TrialStatus
from sweeper.config.environment import PREFIX, without_variables
from sweeper.config.schema import Config
from sweeper.metrics.derivation import LINEAR_BANDS
from sweeper.pages.terminal import draw, open_console
from sweeper.pages.trial_tables import csv_of, format_counts
from sweeper.preflight import cost_model
from sweeper.preflight.cost_model import CostEstimates, Projection
from sweeper.preflight.sweep_plan import SweepPlan, estimate_steps_s
from workloads.api.contract import ProgramFailed
from workloads.api.metrics import choose_summary
from workloads.estimator.estimate import bands

SHOWN_CANDIDATES = 20
LONG_S = 60.0  # a shorter sweep needs no estimate


def describe_devices(plan: SweepPlan) -> str:
    """Describe the devices and the number of concurrent trials."""
    target, gpus = plan.target, plan.resources.gpus
    devices = f"{target.devices} x {target.model}" if target.is_gpu else target.model
    planned = ", planned" if target.is_planned else ""
    per_trial = "" if gpus == 1 else f", each on {gpus} {'GPUs' if target.is_gpu else 'processes'}"
    alone = ", none shares a node" if plan.resources.whole_nodes and target.is_gpu else ""
    return f"{devices}{planned}; {describe_gangs(plan)}{per_trial}{alone}"


def describe_gangs(plan: SweepPlan) -> str:
    return f"{count(plan.resources.gangs, 'trial')} at once"


def _describe_criteria(plan: SweepPlan) -> list[str]:
    criteria = plan.criteria
    if not (criteria.has_front or criteria.limits):
        return []
    goals = ", ".join(f"{goal.direction} {goal.metric}" for goal in criteria.objectives)
    return [f"goal     {'; '.join([goals, *(f'limit {limit}' for limit in criteria.limits)])}"]


def _describe_search(plan: SweepPlan) -> str:
    budget, size, config = plan.config.budget, plan.space.size, plan.config
    valid = "" if plan.estimates is None else "valid "
    points = "continuous" if math.isinf(size) else f"{size:,.0f} {valid}point{'' if size == 1 else 's'}"
    limits = [
        count(budget.trials, "trial") if budget.trials else "",
        f"{budget.time_s:g} s" if budget.time_s else "",
        f"{count(budget.patience, 'trial')} without a better one" if budget.patience else "",
        f"{budget.gpu_hours:g} GPU-hours" if budget.gpu_hours else "",
        f"a cost of {budget.cost:g}" if budget.cost else "",
    ]
    varying = ", ".join(plan.space.dimensions) or "one point"
    sampler = f"{config.search.sampler}, seed {config.seed}"
    return f"{varying} ({points}), sampler {sampler}, until {' or '.join(filter(None, limits))}"


def describe_environment(plan: SweepPlan) -> str:
    """List the environment variables of all trials, if there are any, grouped by where they are set."""
    by_source = dict[str, list[str]]()
    for name, source in plan.variable_sources.items():
        value, variable = plan.space.constants[name], name.removeprefix(PREFIX)
        by_source.setdefault(source, []).append(f"no {variable}" if value is None else f"{variable}={value}")
    return "; ".join(f"{' '.join(variables)} ({source})" for source, variables in by_source.items())


def describe_start(plan: SweepPlan, counts: Mapping[TrialStatus, int], interrupted: int) -> list[str]:
    """Return the first lines to print. `counts` are earlier outcomes; `interrupted` trials will run again."""
    lines = [f"sweep    {plan.name}", f"device   {describe_devices(plan)}", f"search   {_describe_search(plan)}"]
    lines += _describe_criteria(plan)
    lines += [f"env      {line}" for line in [describe_environment(plan)] if line]
    lines += _describe_limits(plan)
    if counts or interrupted:
        rerun = f"{count(interrupted, 'interrupted trial')} again" if interrupted else ""
        lines.append(f"resumed  {'; '.join(filter(None, [format_counts(counts) if counts else '', rerun]))}")
    return lines


def _describe_limits(plan: SweepPlan) -> list[str]:
    lines = [f"excluded {line}" for line in plan.excluded] + [f"busy     {line}" for line in [plan.busy] if line]
    trained = [name for name in plan.criteria.metrics if choose_summary(name) == "last"]
    if (settings := plan.resolved.settings) and trained:
        steps = f"the first {settings['warmup'] + settings['steps']} printed steps, after which a program is ended"
        lines.append(f"note     {', '.join(trained)}: the last of {steps}; for a whole run raise command.steps")
    return lines + [f"warning  {line}" for line in (*plan.gpu_problems, *plan.target.describe_foreign_use())]


def show_plan(plan: SweepPlan) -> bool:
    """Print what the sweep would try, and write plan.csv. Return False if the program failed under plan=run."""
    console = open_console(soft_wrap=False)
    console.print(f"device   {describe_devices(plan)}\nsearch   {_describe_search(plan)}")
    for line in (*_describe_criteria(plan), *_describe_limits(plan)):
        console.print(line, soft_wrap=True)
    if estimate := describe_duration(plan):
        console.print(estimate)
    if environment := describe_environment(plan):
        console.print(f"env      {environment}", soft_wrap=True)
    if fixed := without_variables(plan.space.constants):
        console.print(f"fixed    {format_point(fixed)}")
    if plan.estimates is None:
        for point in plan.initial_points:
            console.print(f"first    {format_point(point)}")
        sampler = plan.config.search.sampler
        console.print(f"then     as {sampler} samples; this workload has no cost model", soft_wrap=True)
    else:
        _show_estimates(plan, plan.estimates, console)
    if text := plan.preview():
        point = plan.first_point()
        console.print(f"\npreview  {format_point(point) if point else 'the only point'}\n")
        console.print(printable(text), soft_wrap=True)
    failure: ProgramFailed | None = None
    if plan.config.plan == "run":
        try:
            read = plan.try_out()
        except ProgramFailed as error:
            failure, read = error, str(error)
        heading = "failed" if failure else "read"
        console.print(f"\n{heading:<9}{printable(read.replace(chr(10), chr(10) + ' ' * 9))}", soft_wrap=True)
    return failure is None


def _show_estimates(plan: SweepPlan, estimates: CostEstimates, console: Console) -> None:
    ends, meaning = plan.find_band()
    if not plan.target.is_gpu:
        console.print("note     estimates for a CPU give the order of points, not their speed")
    else:
        console.print(f"band     {ends} the rate: {meaning}", soft_wrap=True)
    if plan.resolved.workload.estimates_plans:
        console.print("rates    of the catalogue, with PCIe to the host; a trial plans with its GPU's measured rates")
    if plan.calibration:
        console.print(f"rates    {plan.calibration.describe()}", soft_wrap=True)
    if estimates.correction:
        console.print(f"measured {estimates.correction.describe()}", soft_wrap=True)
    _show_candidates(estimates, plan.resolved.workload.work, ends.half_width, console)
    if nodes := plan.resolved.projection_nodes:
        best, project = estimates.valid[0].point, cost_model.project
        per_node = plan.target.devices_per_node(plan.resources.gpus)
        if projection := project(plan.resolved, plan.space, estimates, best, nodes, per_node):
            _show_projection(projection, plan.config, ends.half_width, console)
    # Points that the same rule excludes may share a row, which then gives their number.
    rows = [
        {**candidate.point, "description": candidate.estimate.description, **candidate.estimate.metrics}
        | {"unsupported_reason": candidate.estimate.unsupported_reason, "points": candidate.count}
        for candidate in (*estimates.valid, *estimates.excluded)
    ]
    plan.folder.mkdir(parents=True, exist_ok=True)
    path = plan.folder / "plan.csv"
    path.write_text(csv_of(rows))
    console.print(f"all points, with the reasons: {path}", soft_wrap=True)


def _show_candidates(estimates: CostEstimates, work: Sequence[str], half_width: float, console: Console) -> None:
    headings = {estimates.objective: f"estimated {estimates.objective}", "memory_gib": "GiB"}
    headings |= {"peak_host_gib": "host GiB", "trial_s": "s a trial"}
    shown = [name for name in headings if any(name in candidate.estimate.metrics for candidate in estimates.valid)]
    rows = []
    for place, candidate in enumerate(estimates.valid[:SHOWN_CANDIDATES], start=1):
        metrics = {name: candidate.estimate.metrics.get(name, math.nan) for name in shown}
        values = [
            "" if math.isnan(value) else f"{value:.0f}" if name.endswith("_gib") else round_to_band(value, half_width)
            for name, value in metrics.items()
        ]
        differs = f"{100 * (metrics[shown[0]] / estimates.valid[0].estimate.metrics[shown[0]] - 1):+.1f}"
        different_work = [f"{name} {candidate.point[name]}" for name in work if name in candidate.point]
        point = ", ".join(filter(None, (candidate.estimate.description, *different_work)))
        rows.append([str(place), values[0], differs, *values[1:], point])
    console.print(f"{count(len(estimates.valid), 'valid point')}, the most promising first:")
    if too_large := sum(cost_model.exceeds_memory(candidate, estimates.machine) for candidate in estimates.valid):
        usable = f"{estimates.machine.memory_gib:.0f} GiB that are usable"
        band = f"the estimate of memory is up to {bands()['memory'][0].ends.below:.0%} too high"
        console.print(f"the last {too_large} need more than the {usable}, unless {band}", soft_wrap=True)
    first, *others = (headings[name] for name in shown)
    heading = ["#", first, "differs %", *others, "point"]
    console.print(draw(heading, rows, len(heading), console.width))
    if estimates.excluded:
        violations = cost_model.count_by_rule(estimates.excluded)
        examples = {c.estimate.rule: c.estimate.unsupported_reason for c in reversed(estimates.excluded)}
        rows = [[f"{number:,}", rule, examples[rule]] for rule, number in violations.most_common()]
        console.print(f"{count(violations.total(), 'excluded point')}:")
        console.print(draw(["points", "violated rule", "example"], rows, 3, console.width))


def _show_projection(projection: Projection, config: Config, half_width: float, console: Console) -> None:
    price, objective = config.price_per_hour, config.workload.objective  # the price is for one device
    (fewest, base), *_ = projection.by_devices.items()
    rows = []
    for devices, value in projection.by_devices.items():
        linear = [base / fewest * devices * band for band in LINEAR_BANDS]
        totals = [value * SECONDS_PER_DAY / 1e9, *([devices * price / value / SECONDS_PER_HOUR * 1e6] if price else [])]
        row = [f"{devices / projection.gpus_per_node:g}", str(devices), f"{projection.batches[devices]:,}"]
        estimates = [round_to_band(number, half_width) for number in (value, value / devices, *linear, *totals)]
        rows.append([*row, *estimates[:2], f"{value / (base / fewest * devices):.0%}", *estimates[2:]])
    unit = objective.removesuffix("_per_s")
    heading = ["nodes", "devices", "sequences a step", objective, "per device", "of linear"]
    heading += [*(f"{band:.0%} of linear" for band in LINEAR_BANDS), f"10^9 {unit} a day"]
    heading += [f"cost of 10^6 {unit}"] if price else []
    for part in ("", draw(heading, rows, 4, console.width), f"assumptions: {projection.assumptions}"):
        console.print(part)


def describe_duration(plan: SweepPlan) -> str:
    """Describe the duration that the cost model predicts, unless the sweep is short or there is no estimate."""
    steps_s = estimate_steps_s(plan)
    if steps_s is None or steps_s < LONG_S:
        return ""
    text = f"estimate about {format_duration(steps_s)} of steps by the cost model; starting and compiling come on top"
    budget = plan.config.budget
    if budget.time_s is None or budget.trials is None or plan.estimates is None or budget.time_s >= steps_s:
        return text
    fitting = int(min(budget.trials, len(plan.estimates.valid)) * budget.time_s / steps_s)
    return f"{text}; without them, budget.time_s has room for the steps of {count(fitting, 'trial')}"
