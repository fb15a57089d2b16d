"""Answer a planning request: the fastest layouts, the effect of doubling quantities, and the cost of a training run."""

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property

from sweeper.commands.plan.request import TOKENS_PER_STEP, PlanRequest, Problem, build_problem
from sweeper.common.clock import SECONDS_PER_DAY
from sweeper.common.format import show_range
from workloads.api.contract import BandEnds
from workloads.api.errors import UserInputError
from workloads.estimator.estimate import Band, JobEstimate, StageMemory, find_band
from workloads.estimator.questions import Reliability, TrainingRun, alternatives, training_run
from workloads.estimator.search import Candidate, Search, SearchResult, bound_gib, estimate_layout, find_layouts
from workloads.formats.files import find_obstacle
from workloads.hardware.precisions import PRECISIONS
from workloads.layouts.layout import Layout, describe, write_words
from workloads.layouts.rules import find_common_violation, find_violation
from workloads.layouts.trainers import OWN, find_trainer
from workloads.models.flops import model_flops_per_token

KEPT = 20  # number of layouts that a search keeps
SHOWN = 8  # number of layouts in the table
MAX_GPUS = 65_536
SCALES = tuple(2**power for power in range(13))  # numbers of GPUs in the scaling chart


@dataclass(frozen=True)
class Answer:
    request: PlanRequest
    problem: Problem
    result: SearchResult  # the layouts found, the fastest first
    faster: Candidate | None  # the fastest layout of all, if the given layout fields exclude this layout
    alternatives: dict[str, Candidate]  # the fastest layout and its estimate, by doubled quantity or other change
    training: TrainingRun  # a complete training run with the fastest layout
    rates: dict[int, float]  # tokens per day, by number of GPUs tried for `tokens_per_day`, `days` or `max_cost`

    @property
    def best(self) -> Candidate:
        return self.result.best[0]

    @cached_property
    def band(self) -> Band:
        """The error band of rates."""
        return find_band(self.problem.job, self.problem.cluster)


Report = Callable[[str], None]  # takes a line about a search that takes seconds


def report_nothing(_: str) -> None:
    """Ignore a line about a search that takes seconds."""


def answer(request: PlanRequest, report: Report = report_nothing) -> Answer:
    """Find the fastest layouts for a request. Raises UserInputError if the request is invalid or no layout fits."""
    if request.file:
        asked = build_problem(request)
        if reason := find_obstacle(asked.job, asked.given, request.file, request.model):
            raise UserInputError(f"file={reason}")
    problem, rates = find_problem(request, report)
    try:
        result = search(problem)
    except NothingFits as error:
        raise NothingFits(f"{error}{_find_remedy(problem)}") from error
    estimate, faster = result.best[0].estimate, None
    training = plan_training(request, estimate, find_band(problem.job, problem.cluster).ends)
    if problem.given:  # the given fields may exclude a faster layout
        fixed = find_trainer(problem.job.trainer).fixed_degrees()
        free = search(replace(problem, fixed=fixed, given={}), keep=1).best[0]
        if free.estimate.step.total_s < 0.999 * estimate.step.total_s:
            faster = free
    doubled = {}
    for name, (job, cluster) in alternatives(problem.job, problem.cluster).items():
        if cluster.device != problem.cluster.device:  # more layouts may fit on this device
            doubled[name] = search(replace(problem, cluster=cluster), 1, result.search).best[0]
            continue
        layouts = [replace(item.layout, global_batch=job.layout.global_batch) for item in result.best]
        candidates = [_correct(estimate_layout(layout, job, cluster), problem) for layout in layouts]
        doubled[name] = max(candidates, key=lambda candidate: candidate.estimate.tokens_per_s_per_gpu)
    return Answer(request, problem, result, faster, doubled, training, rates)


def _find_remedy(problem: Problem) -> str:
    """Return a change of the state, or else of the number of GPUs, with which a layout fits, as a sentence, or ""."""
    short = replace(problem, job=replace(problem.job, state="bf16"))
    more = {f"gpus={n}": problem.on(n) for n in (problem.cluster.gpus * 2**power for power in range(1, 8))}
    changes = {"state=bf16": short} if short != problem else {}
    for name, changed in (changes | more).items():
        with suppress(UserInputError):
            search(changed, keep=1)
            return f". It fits with {name}, for example"
    return ""


def plan_training(request: PlanRequest, estimate: JobEstimate, ends: BandEnds) -> TrainingRun:
    """Return the time and cost of training on `train_tokens`. Raises UserInputError if the cost exceeds `max_cost`."""
    tokens = request.train_tokens
    training = training_run(estimate, tokens, request.reliability, request.price[0])
    if request.max_cost is None:
        return training
    price = find_price(request)
    if training.cost is not None and training.cost > request.max_cost:
        cost = show_range(training.cost, ends, request.max_cost)
        assumed = "" if request.price_per_hour is not None else ", which is assumed"
        fewer = "" if request.finds_gpus else "fewer GPUs, or "
        is_cheapest, most = request.finds_gpus and not request.daily_tokens, tokens * request.max_cost / training.cost
        number = f"{estimate.gpus:,} GPUs" + ", the cheapest number found," * is_cheapest
        raise UserInputError(
            f"max_cost={request.max_cost:g}: train_tokens={tokens:g} on {number} cost {cost} at "
            f"price_per_hour={price:g}{assumed}; max_cost pays for about "
            f"train_tokens={most:.2g}, and {fewer}others (hardware=a,b) may cost less"
        )
    return training


def find_price(request: PlanRequest) -> float:
    """Return the price that `max_cost` needs. Raises UserInputError if none is known."""
    if (price := request.price[0]) is not None:
        return price
    raise UserInputError(f"max_cost={request.max_cost:g}: needs price_per_hour=, {request.hardware} has no known price")


def find_problem(request: PlanRequest, report: Report = report_nothing) -> tuple[Problem, dict[int, float]]:
    """Return the problem for the number of GPUs, given or found, and the rates tried. Raises UserInputError."""
    problem = build_problem(request)
    if not request.finds_gpus:
        return problem, {}
    find = _find_affordable_gpus if request.daily_tokens is None else _find_gpus
    rates, gpus = find(problem, request, report)
    return problem.on(gpus), {tried: rate for tried, rate in sorted(rates.items()) if rate and tried <= gpus}


class NothingFits(UserInputError):
    """Raised if some layouts are valid but none of them fits in memory."""


def search(problem: Problem, keep: int = KEPT, again: Search | None = None) -> SearchResult:
    """Return the fastest layouts that fit. Raises NothingFits if no layout fits, or UserInputError if none is valid."""
    tried = find_trainer(problem.job.trainer).search
    result = find_layouts(problem.job, problem.cluster, tried, problem.fixed, keep, again)
    if result.best:
        return replace(result, best=tuple(_correct(candidate, problem) for candidate in result.best))
    if result.smallest is None:
        # Find the rule that the given fields violate, if a single layout with these fields shows the violation.
        layout = replace(problem.job.layout, **problem.fixed)
        usual = {"dp_shard": max(1, problem.cluster.gpus // layout.gpus), "sharding": tried["sharding"][-1]}
        layout = replace(layout, **{**usual, **problem.fixed})
        job, cluster = replace(problem.job, layout=layout), replace(problem.cluster, gpus=layout.gpus)
        if violation := find_violation(job, cluster):
            is_named = job.trainer in violation.reason or find_common_violation(job, cluster)
            rest = "" if is_named else f", with trainer={job.trainer}"
            raise UserInputError(violation.reason + rest)
        given = {name: value for name, value in problem.given.items() if value != getattr(Layout(), name)}
        given["global_batch"] = problem.job.layout.global_batch
        raise UserInputError(f"no layout of {problem.cluster.gpus} GPUs has {write_words(given)}")
    smallest, cluster = result.smallest, problem.cluster
    is_whole = problem.job.trainer == OWN and problem.given.get("ep", 1) > 1
    hint = ". This trainer divides experts by ep alone; torchtitan shards them too" if is_whole else ""
    raise NothingFits(
        f"gpus={cluster.gpus}: no layout fits; the smallest needs up to "
        f"{bound_gib(smallest.estimate.memory, problem.job, cluster):.0f} GiB of each GPU, "
        f"{cluster.usable_gib:.0f} GiB of {cluster.device.name} are usable. It is {describe(smallest.layout)}{hint}"
    )


def _correct(candidate: Candidate, problem: Problem) -> Candidate:
    if problem.correction is None:
        return candidate
    estimate = candidate.estimate
    return replace(candidate, estimate=replace(estimate, step=estimate.step.scaled(problem.correction.factor)))


class _Rates(dict[int, float]):
    """Tokens per day by number of GPUs, with failures except for `tokens_per_day`. Looking up a number searches for its
    fastest layout; 0 means that none can be planned."""

    def __init__(self, problem: Problem, request: PlanRequest, report: Report) -> None:
        super().__init__()
        self.problem, self.report, self.reason = problem, report, ""  # why the last number without a plan has none
        self.reliability = Reliability(0.0) if request.tokens_per_day is not None else request.reliability

    def __missing__(self, gpus: int) -> float:
        self.report(f"searching {gpus:,} x {self.problem.cluster.device.name}")
        self[gpus] = 0.0
        try:
            estimate = search(self.problem.on(gpus), keep=1).best[0].estimate
            self[gpus] = estimate.tokens / training_run(estimate, estimate.tokens, self.reliability, None).days
        except UserInputError as error:
            self.reason = str(error)
        return self[gpus]


def _find_gpus(problem: Problem, request: PlanRequest, report: Report) -> tuple[_Rates, int]:
    """Return tokens per day by number of GPUs, and the smallest number found that reaches the requested rate. Try
    only whole domains: first 1 and 3 times powers of two, then bisect to within one domain or 1/31. Skip sizes that do
    not divide the batch. Skip sizes that are too small even at peak rate, or try them last if the batch is given. For
    `days`, up to twice as many GPUs may save 5% of GPU-hours. Raises UserInputError if no number reaches the rate."""
    tokens_per_day, at_least = request.daily_tokens or 0.0, request.gpus or 1
    key = f"tokens_per_day={tokens_per_day:g}"
    key = key if request.days is None else f"days={request.days:g} (train_tokens={request.train_tokens:g})"
    job, peaks = problem.job, problem.cluster.device.peak_tflops
    flops_per_s = tokens_per_day / SECONDS_PER_DAY * model_flops_per_token(job.model, job.sequence_length)
    too_few = flops_per_s / (1e12 * peaks.get(PRECISIONS[job.precision].dtype, math.inf))
    domain, rates = problem.cluster.topology.gpus_per_domain, _Rates(problem, request, report)

    def reaches(gpus: int) -> bool:
        return rates[gpus] >= tokens_per_day

    def write(rate: float) -> str:
        return f"tokens_per_day={rate:.3g}" if request.days is None else f"days={request.train_tokens / rate:.4g}"

    fewest = math.ceil(at_least / domain) * domain
    sizes = sorted({fewest, *(domain * step * 2**power for power in range(14) for step in (1, 3))})
    sizes = [size for size in sizes if at_least <= size <= MAX_GPUS]
    if not sizes:
        raise UserInputError(f"gpus={at_least}: at most {MAX_GPUS:,} with tokens_per_day= or days=")
    if sizes[-1] < too_few:
        best = write(tokens_per_day * sizes[-1] / too_few)
        needed = f"{key}: takes {too_few:,.0f} GPUs at their peak"
        raise UserInputError(f"{needed}, and at most {sizes[-1]:,} are planned, which reach at best {best}")
    enough = sorted((n for n in sizes if n >= too_few or problem.batch), key=lambda n: (n < too_few, n))
    if 3 * too_few > sizes[-1] and not problem.batch:  # probably unreachable: try the most GPUs first
        most = next((size for size in reversed(enough) if rates[size]), 0)
        enough = [size for size in enough if size <= most] if most and reaches(most) else []
    if high := next(filter(reaches, enough), 0):
        low = max([0, *(size for size in sizes if size < high)])
        while low and high - low > max(domain, low // 31):
            middle = (low + high) // (2 * domain) * domain
            low, high = (low, middle) if reaches(middle) else (middle, high)
        larger = [n for n in sizes if high < n <= 2 * high and request.days is not None and reaches(n)]
        cheapest = min([high, *larger], key=lambda n: n / rates[n])
        return rates, cheapest if 1.05 * cheapest / rates[cheapest] < high / rates[high] else high
    if not any(rates.values()):
        raise UserInputError(f"{key}: no number of GPUs can be planned. {rates.reason}")
    fastest = max(rates, key=rates.__getitem__)
    batch = "a larger global_batch" if problem.batch else "a given global_batch"
    raise UserInputError(f"{key}: {fastest:,} GPUs are the fastest and reach {write(rates[fastest])}; {batch} may help")


def _find_affordable_gpus(problem: Problem, request: PlanRequest, report: Report) -> tuple[_Rates, int]:
    """Return tokens per day by number of GPUs, and the fastest number found that trains for at most `max_cost`, or
    the cheapest if none does. Try powers of two of whole domains until the cost exceeds both the limit and 1.1 times
    the lowest cost, since more GPUs then cost more; bisect as `_find_gpus` does."""
    limit, price = request.max_cost or 0.0, find_price(request)
    domain, rates = problem.cluster.topology.gpus_per_domain, _Rates(problem, request, report)
    costs = dict[int, float]()

    def cost(gpus: int) -> float:
        return price * 24 * gpus * request.train_tokens / rates[gpus] if rates[gpus] else math.inf

    for size in (domain * 2**power for power in range(17) if domain * 2**power <= MAX_GPUS):
        if not problem.batch and size * problem.job.sequence_length > TOKENS_PER_STEP and any(rates.values()):
            break  # more GPUs would have a larger batch
        costs[size] = cost(size)
        if math.inf > costs[size] > max(limit, 1.1 * min(costs.values())):
            break
    if not any(rates.values()):
        raise UserInputError(f"max_cost={limit:g}: no number of GPUs can be planned. {rates.reason}")
    within = [size for size in costs if costs[size] <= limit]
    low = max(within, key=rates.__getitem__) if within else min(costs, key=costs.__getitem__)
    high = min((size for size in costs if size > low), default=0) if within else 0
    while high - low > max(domain, low // 31):
        middle = (low + high) // (2 * domain) * domain
        is_better = cost(middle) <= limit and rates[middle] > rates[low]
        low, high = (middle, high) if is_better else (low, middle)
    return rates, low


def scale(problem: Problem, report: Report = report_nothing) -> dict[int, Candidate]:
    """Return the fastest layout for each number of GPUs in `SCALES` on which the model fits."""
    free = {name: value for name, value in problem.fixed.items() if name not in ("dp_replicate", "dp_shard")}
    candidates = {}
    for gpus in SCALES:
        report(f"searching {gpus:,} x {problem.cluster.device.name}")
        with suppress(UserInputError):
            candidates[gpus] = search(replace(problem, fixed=free).on(gpus), keep=1).best[0]
    return candidates


def memory_parts(memory: StageMemory, problem: Problem) -> dict[str, float]:
    """Return the parts of a GPU's memory that add up to its bound. They exclude reserved memory, which is to spare."""
    parts = {name: gib for name, gib in vars(memory).items() if name != "reserved"}
    return parts | {"error_band": bound_gib(memory, problem.job, problem.cluster) - memory.needed_gib}


def tokens_of_a_day(estimate: JobEstimate) -> float:
    """Return the number of tokens that all GPUs together process per day if there are no failures."""
    return estimate.tokens / estimate.step.total_s * SECONDS_PER_DAY
