"""Print a plan as lines and tables: the best layout, its time and memory by part, and possible improvements."""

import math
import re
import textwrap
from contextlib import suppress
from dataclasses import replace
from itertools import zip_longest
from typing import Any

from rich.console import Console

from sweeper.commands.plan.answer import KEPT, SHOWN, Answer, memory_parts, tokens_of_a_day
from sweeper.commands.plan.request import OF_EXPERTS, TOKENS_PER_STEP, PlanRequest, Problem, build_problem
from sweeper.common.format import count, round_to_band, show_range
from sweeper.pages.terminal import draw, open_console
from sweeper.preflight.clusters import list_mismatches
from workloads.api.errors import UserInputError
from workloads.estimator.operations import LAUNCHES_S, launch_ratio
from workloads.estimator.questions import explain_slower
from workloads.estimator.search import Candidate, bound_gib, fills_memory
from workloads.estimator.step import step_seconds
from workloads.formats.files import FORMATS, find_obstacle
from workloads.formats.names import FileReading
from workloads.hardware.cluster import Cluster
from workloads.layouts.layout import Job, Layout, describe, layout_words, write_words
from workloads.layouts.trainers import find_trainer, is_own
from workloads.models.flops import model_flops_per_token

MISSING = "—"
INDENT = " " * 10  # the width of the first column, which holds the first word of each line
# Settings with little effect on step time or memory, listed last among the ignored settings.
WITHOUT_EFFECT = re.compile(
    r"swiglu|norm|rotary|position|untie|bias_linear|lr|learning|adam|decay|warmup|iters|steps?$|seed|init|save|load|ckpt|checkpoint\b|path|dir|file|folder|token|vocab|"
    r"data|split|log|tensorboard|wandb|exp|name|eval|interval|metrics|profil|dropout|clip|eps|descr|valid|dump|master|port"
)
# Bands are based on 30 runs with context parallelism. Only one of these runs has fewer tokens per rank.
USUAL_CONTEXT_TOKENS = 4096
IMBALANCES = (1.0, 1.1, 1.25, 1.5, 2.0, 4.0)  # between ranks, with which plans show natural routing
Rows = tuple[list[str], list[list[str]]]


def show(answer: Answer) -> None:
    console = open_console(soft_wrap=False)
    print_lines(console, head_lines(answer))
    console.print(draw(*parts_table(answer), 3, console.width))
    console.print(draw(*layouts_table(answer), 5, console.width))
    if answer.faster is not None:
        print_lines(console, comparison_lines(answer))
        console.print(draw(*differences_table(answer), 4, console.width))
    print_lines(console, tail_lines(answer))


def show_file(request: PlanRequest) -> None:
    """Print the values that a request takes from a trainer's file, unless the request is invalid."""
    with suppress(UserInputError):
        problem = build_problem(request)
        if problem.reading:
            print_lines(open_console(soft_wrap=False), file_lines(problem, problem.reading))


def print_lines(console: Console, lines: list[str]) -> None:
    """Print lines, wrapped to the terminal's width and with continuation lines indented to the second column."""
    for line in lines:
        wrapper = textwrap.TextWrapper(console.width, subsequent_indent=INDENT, drop_whitespace=True)
        wrapper.break_long_words = wrapper.break_on_hyphens = False
        wrapper.initial_indent = INDENT if line.startswith(INDENT) else ""
        console.print("\n".join(wrapper.wrap(line.removeprefix(wrapper.initial_indent))), soft_wrap=True)


def list_sections(answer: Answer) -> list[tuple[str, list[str]]]:
    """Return each heading in the first column with the lines below it. Tables are not included."""
    sections: list[tuple[str, list[str]]] = []
    for line in [*head_lines(answer), *comparison_lines(answer), *tail_lines(answer)]:
        word, text = line[: len(INDENT)].strip(), line[len(INDENT) :]
        if word and not (sections and sections[-1][0] == word):
            sections.append((word, []))
        sections[-1][1].append(text)
    return sections


def headline(answer: Answer) -> str:
    """Return the answer as one sentence: the rate, and the time and cost of a training run, with error ranges."""
    estimate, training, ends = answer.best.estimate, answer.training, answer.band.ends
    cluster, job = answer.problem.cluster, answer.problem.job
    far = "Far from any measured run: " * bool(answer.band.known.missing(job, cluster))
    rate = show_range(estimate.tokens_per_s_per_gpu * estimate.gpus, ends, is_rate=True)
    most_gib, usable = bound_gib(estimate.memory, job, cluster), cluster.usable_gib
    unfit = f" if it fits: it may need {most_gib:.0f} of {usable:.0f} GiB" * (most_gib > usable)
    cost = ", no price is known"
    if training.cost is not None:
        price = answer.request.price[1].partition(":")[0]
        cost = f" and cost {show_range(training.cost, ends, answer.request.max_cost)} at {price}"
    return (
        f"{far}{answer.request.model} on {estimate.gpus:,} {cluster.device.name} trains at {rate} tokens/s{unfit}; "
        f"{show_tokens(training.tokens)} tokens take {show_range(training.days, ends, answer.request.days)} days or "
        f"{show_range(training.gpu_hours, ends)} GPU-hours{cost}"
    )


def show_tokens(count: float) -> str:
    """Format a number of tokens in trillions, billions or millions."""
    scale, name = next((pair for pair in ((1e12, "trillion"), (1e9, "billion")) if count >= pair[0]), (1e6, "million"))
    return f"{count / scale:g} {name}"


def head_lines(answer: Answer) -> list[str]:
    """Return lines about the search and the best layout."""
    problem, result, ends = answer.problem, answer.result, answer.band.ends
    job, cluster = problem.job, problem.cluster
    topology, device = cluster.topology, cluster.device
    tokens = job.layout.global_batch * job.sequence_length
    eager = "" if job.compiled or not find_trainer(job.trainer).compiles else ", not compiled"
    wiring = {"switch": "a switch", "pairs": "links between pairs", "host": "the processors"}[topology.wiring]
    found = result.estimated + result.slower
    may_not_fit = bound_gib(answer.best.estimate.memory, job, cluster) > cluster.usable_gib  # then none surely fits
    fit = f"{result.too_large:,} do not fit{f', {found:,} may not fit' * may_not_fit}"
    slower = f", {found - len(result.best):,} are slower than the best {len(result.best)}" if found > KEPT else ""
    model = job.model
    active, flops = model.active_parameters, model_flops_per_token(model, job.sequence_length)
    embedded, remark = (active + model.embedding_weights) / 1e9, f"; {model.remark}" if model.remark else ""
    looked_up = "" if model.tied else f" ({embedded:.4g} B with embeddings, which are looked up)"
    far = answer.band.known.missing(job, cluster)
    shown = [name for name in OF_EXPERTS if name != "expert_imbalance" or job.expert_loads == "natural"]
    experts = write_words({name: getattr(job, name) for name in shown})
    experts += " forced balance" * (job.expert_loads == "equal")
    lines = [
        f"answer    {headline(answer)}",
        *(f"far       {line}" for line in far),
        f"train     {answer.request.model} by {job.trainer}, {job.precision}, {job.state} state{eager}; "
        f"{count(job.layout.global_batch, 'sequence')} of {job.sequence_length:,} tokens a step "
        f"({tokens / 1e6:.3g} M tokens)",
        *([f"experts   {experts}"] if model.experts else []),
        f"model     {model.parameters / 1e9:.4g} B parameters, {active / 1e9:.4g} B active"
        f"{looked_up}, {flops / 1e9:.4g} GFLOP per token, forward and backward{remark}",
        f"cluster   {cluster.gpus:,} x {device.name} ({device.memory_gib:.0f} GiB); {topology.name}: "
        f"{topology.gpus_per_domain} GPUs over {wiring} at {topology.link_gb_s:g} GB/s, "
        f"{topology.network_gb_s:g} GB/s of network for each GPU",
        f"searched  {count(found + result.too_large, 'valid layout')}: {fit}{slower}",
    ]
    lines += [f"rates     {problem.calibration.describe()}"] if problem.calibration else []
    lines += [f"measured  {problem.correction.describe()}"] if problem.correction else []
    lines += file_lines(problem, problem.reading) if problem.reading else []
    of_file = problem.reading.layout if problem.reading else None
    given = {name: value for name, value in problem.given.items() if of_file is None or value != getattr(of_file, name)}
    lines += [f"given     {write_words(dict(sorted(given.items())))}"] if given else []
    lines += [f"reached   by {describe_reached(answer)}"] if answer.rates else []
    estimate = answer.best.estimate
    step_s, memory = estimate.step.total_s, estimate.memory
    # The allocator releases what it reserves beyond the usable memory (see `fills_memory`).
    reserved_gib = max(memory.needed_gib, min(memory.total_gib, cluster.usable_gib)) - memory.runtime
    mfu = MISSING if estimate.mfu is None else f"{100 * estimate.mfu:.0f}%"
    return [
        *lines,
        f"best      {describe(answer.best.layout)}",
        f"{INDENT}step {show_range(step_s, ends)} s, "
        f"{round_to_band(estimate.tokens_per_s_per_gpu, ends.half_width)} tokens/s per GPU, MFU {mfu}, "
        f"{round_to_band(tokens_of_a_day(estimate) / 1e9, ends.half_width)}B tokens a day",
        f"{INDENT}memory needs up to {bound_gib(memory, job, cluster):.0f} of {cluster.usable_gib:.0f} usable GiB; the "
        f"framework reports {memory.allocated_gib:.0f} allocated, {reserved_gib:.0f} reserved, partly to spare",
    ]


def describe_reached(answer: Answer) -> str:
    """Describe the rate of the number of GPUs that was found, and the numbers that are too few or take more time."""
    rates, wanted, found = answer.rates, answer.request.daily_tokens or 0.0, answer.problem.cluster.gpus
    fewer, fewest = [n for n, rate in rates.items() if rate < wanted], min(n for n in rates if rates[n] >= wanted)
    others = f"; too few are {fewer[-1]:,} GPUs" if fewer else ""
    if wanted and fewest < found:
        more = fewest / rates[fewest] / (found / rates[found]) - 1
        others += f"; {fewest:,} GPUs are enough, but need {more:.0%} more GPU-hours"
    others += f"; gpus={answer.request.gpus:,} is the fewest that were tried" if answer.request.gpus else ""
    middle, target, ends = rates[found] / 1e9, wanted / 1e9 or math.nan, answer.band.ends
    rate, slow = (round_to_band(middle * end, ends.half_width, target) for end in (1, 1 - ends.below))
    failures = ", failures included," * (answer.request.tokens_per_day is None)
    return f"{found:,} GPUs {rate}B tokens a day{failures} by the middle of the band, {slow}B at its slow end{others}"


def file_lines(problem: Problem, reading: FileReading) -> list[str]:
    """List the fields read from a trainer's file, with our names and the names in the file, and the ignored fields."""
    of_job = ("sequence_length", "precision", "state", "compiled", *reading.others)
    of_plan = {"global_batch": problem.job.layout.global_batch, "gpus": problem.cluster.gpus}
    planned = {**{name: getattr(problem.job, name) for name in of_job}, **problem.given, **of_plan}
    values: dict[str, Any] = {**vars(reading.layout), **vars(reading), **reading.others}
    taken, left, of_model = dict[str, list[str]](), list(dict.fromkeys(reading.left)), list[str]()
    for key, (name, value) in reading.taken.items():
        if name not in values or name == "model":
            of_model.append(key)
        elif planned.get(name, values[name]) != values[name]:
            left.append(f"{key} ({write_words({name: planned[name]})} is given)")
        else:
            is_same = write_words({key: values[name]}) == write_words({key: value})
            taken.setdefault(name, []).append(key if is_same else write_words({key: value}))
    words = [f"{write_words({name: values[name]})} ({', '.join(keys)})" for name, keys in taken.items()]
    words += [f"of the model: {', '.join(of_model)}"] if of_model else []
    left.sort(key=lambda key: bool(WITHOUT_EFFECT.search(key)))
    named = {"gpus", *taken, *reading.others, *(() if find_trainer(problem.job.trainer).compiles else ("compiled",))}
    default = {name: planned[name] for name in sorted(planned.keys() - named) if values[name] in (planned[name], 0)}
    lines = [
        f"taken     {', '.join(words)}",
        f"default   {write_words(default)}: the file does not name these",
        *([f"not taken {', '.join(left)}"] if left else []),
    ]
    return lines + [f"{INDENT if left or number else 'not taken '}{note}" for number, note in enumerate(reading.notes)]


def parts_table(answer: Answer) -> Rows:
    """Return a table of the best layout's step time and memory by part, side by side."""
    step = answer.best.estimate.step
    times, sizes = (
        sorted(((name, value) for name, value in parts.items() if value > 0), key=lambda pair: -pair[1])
        for parts in (vars(step), memory_parts(answer.best.estimate.memory, answer.problem))
    )
    left = [
        [name, round_to_band(1e3 * seconds, answer.band.ends.half_width), f"{100 * seconds / step.total_s:.0f}"]
        for name, seconds in times
    ]
    right = [[name, f"{gib:.1f}"] for name, gib in sizes]
    right.append(["at most", f"{sum(gib for _, gib in sizes):.1f}"])
    rows = [[*(time or ["", "", ""]), *(size or ["", ""])] for time, size in zip_longest(left, right)]
    return ["step", "ms", "%", "memory of a GPU", "GiB"], rows


def layouts_table(answer: Answer) -> Rows:
    """Return a table of the fastest layouts with the fields in which they differ."""
    shown = answer.result.best[:SHOWN]
    best_s = answer.best.estimate.step.total_s
    fields_of = [layout_words(candidate.layout) for candidate in shown]
    varying = [name for name in fields_of[0] if len({values[name] for values in fields_of}) > 1]
    rows = []
    for values, candidate in zip(fields_of, shown, strict=True):
        step_s, mfu = candidate.estimate.step.total_s, candidate.estimate.mfu
        most_gib = bound_gib(candidate.estimate.memory, answer.problem.job, answer.problem.cluster)
        used = MISSING if mfu is None else f"{100 * mfu:.0f}"
        differing = write_words({name: values[name] for name in varying})
        differing += " (cp beyond measured runs)" * _has_short_parts(answer.problem, candidate.layout)
        differing += " (may not fit)" * (most_gib > answer.problem.cluster.usable_gib)
        differing += " (fills memory)" * fills_memory(candidate.estimate.memory, answer.problem.cluster)
        time, slower = round_to_band(step_s, answer.band.ends.half_width), f"{100 * (step_s / best_s - 1):.1f}"
        rows.append([time, slower, used, f"{most_gib:.0f}", differing])
    return ["step s", "slower %", "MFU %", "GiB at most", "layout, where they differ"], rows


def comparison_lines(answer: Answer) -> list[str]:
    """Explain why the given layout is slower than the fastest layout. Return no lines for the fastest layout."""
    if answer.faster is None:
        return []
    given, fastest = answer.best.estimate.step, answer.faster.estimate.step
    slower_share = given.total_s / fastest.total_s - 1
    band = "" if slower_share > answer.band.ends.half_width else "; within the band of an estimate, so measure both"
    return [
        f"slower    by {100 * slower_share:.0f}% than {describe(answer.faster.layout)}{band}",
        f"{INDENT}{explain_slower(given, fastest)}",
    ]


def differences_table(answer: Answer) -> Rows:
    """Return a table of step time differences between the given layout and the faster layout."""
    assert answer.faster is not None
    given, faster, half_width = answer.best.estimate.step, answer.faster.estimate.step, answer.band.ends.half_width
    pairs = {name: (seconds, getattr(faster, name)) for name, seconds in vars(given).items()}
    pairs = dict(sorted(pairs.items(), key=lambda item: item[1][1] - item[1][0]))
    rows = []
    for name, pair in {**pairs, "step": (given.total_s, faster.total_s)}.items():
        if any(pair):
            difference_ms = 1e3 * pair[0] - 1e3 * pair[1]
            times = [round_to_band(1e3 * seconds, half_width) for seconds in pair]
            rows.append([name, *times, "+" * (difference_ms > 0) + round_to_band(difference_ms, half_width)])
    return ["ms", "given", "fastest", "difference"], rows


def tail_lines(answer: Answer) -> list[str]:
    """Return lines about possible improvements, the complete training run, and the accuracy of the estimate."""
    problem, estimate, training, band = answer.problem, answer.best.estimate, answer.training, answer.band
    lines = []
    for name, candidate in answer.alternatives.items():
        gain = candidate.estimate.tokens_per_s_per_gpu / estimate.tokens_per_s_per_gpu - 1
        is_same = describe(candidate.layout) == describe(answer.best.layout)
        changed = "" if is_same else f", then with {describe(candidate.layout)}"
        if round(100 * gain):
            lines.append(f"with      {name}: {100 * gain:+.0f}%{changed}")
    lines = lines or [f"with      {', '.join(answer.alternatives)}: no more than 1%"]
    if problem.job.model.experts:
        lines.append(f"routing   {describe_routing(problem.job, problem.cluster, answer.best.layout)}")
    failures = round_to_band(training.failures, band.ends.half_width)
    lines.append(f"training  loses {training.lost_share:.1%} of its time to {failures} failures and to checkpoints")
    price, max_cost = answer.request.price[1], answer.request.max_cost
    lines += [f"price     {price}"] if price else []
    if max_cost is not None and (training.cost or 0.0) / (1 - band.ends.below) > max_cost:
        lines.append(f"max_cost  {max_cost:g} is met by the middle of the band, not by its slow end")
    trainer = problem.job.trainer
    if trainer in FORMATS and (reason := find_obstacle(problem.job, problem.given, trainer, answer.request.model)):
        lines.append(f"file      none can be written for this plan: {reason}")
    meaning = band.meaning + band.describe_pair(find_trainer(trainer).name, problem.cluster.device.name)
    lines.append(f"band      {band.ends} the rate: {meaning} (docs/reference/planner-scoreboard.md)")
    return lines + [f"unsure    {line}" for line in list_warnings(problem, answer.best)]


def describe_routing(job: Job, cluster: Cluster, layout: Layout) -> str:
    """Compare natural routing with forced balance in one layout, by the imbalance between its ranks."""
    equal = replace(job, layout=layout, expert_loads="equal", expert_imbalance=1.0)
    is_given = job.expert_loads == "natural"
    given = [min(job.expert_imbalance, layout.ep)] if is_given else [n for n in IMBALANCES if n <= layout.ep]
    uneven = [replace(equal, expert_loads="natural", expert_imbalance=imbalance) for imbalance in given]
    shares = {one.expert_imbalance: step_seconds(equal, cluster) / step_seconds(one, cluster) for one in uneven}
    rates, imbalances = ", ".join(f"{share:.2f}" for share in shares.values()), ",".join(f"{n:g}" for n in given)
    text = f"natural with expert_imbalance={imbalances} has {rates} of the rate of forced balance here"
    hidden = [imbalance for imbalance, share in shares.items() if imbalance > 1 and share > 0.999]
    if not hidden or is_own(job):
        return text
    launches_ms = 1e3 * LAUNCHES_S * launch_ratio(cluster.device)
    host = f"the host takes {launches_ms:.3g} ms to launch a block, longer than the busiest GPU computes"
    return f"{text}: {host} up to expert_imbalance={hidden[-1]:g}"


def _has_short_parts(problem: Problem, layout: Layout) -> bool:
    return layout.cp > 1 and problem.job.sequence_length / layout.cp < USUAL_CONTEXT_TOKENS


def list_warnings(problem: Problem, best: Candidate) -> list[str]:
    """List the uncertainties in the estimate for the best layout."""
    estimate, most_gib = best.estimate, bound_gib(best.estimate.memory, problem.job, problem.cluster)
    unfit = f"whether it fits: no layout's bound of memory does, and that of this one is {most_gib:.0f} GiB"
    stalls = "the rate: it fills memory, so its steps may stall (by 1 to 18% in measured runs)"
    unsure = [unfit] * (most_gib > problem.cluster.usable_gib)
    unsure += [stalls] * fills_memory(estimate.memory, problem.cluster)
    step_tokens = problem.job.layout.global_batch * problem.job.sequence_length
    if problem.batch is None and step_tokens > 2 * TOKENS_PER_STEP:
        unsure.append(
            f"whether it learns as well: each GPU takes a sequence, so a step has {step_tokens / 1e6:,.0f} M tokens, "
            f"not about {TOKENS_PER_STEP / 1e6:.0f} M; global_batch= sets them"
        )
    rates = "the band is that of estimates with the tables' rates, not with rates measured here"
    unsure += [rates] * (problem.calibration is not None) + [*estimate.not_modelled]
    unsure += [f"the links: {line}" for line in list_mismatches(problem.cluster)]
    if _has_short_parts(problem, best.layout):
        unsure.append(f"the rate: one measured run has fewer than {USUAL_CONTEXT_TOKENS:,} tokens on a context rank")
    return unsure
