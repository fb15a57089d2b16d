"""An answer as text: the best layout, where its time and memory go, the next ones, and what would change it."""

from __future__ import annotations

import math
from dataclasses import fields

from rich.console import Console

from sweeper.plan.answer import SHOWN, Answer, tokens_of_a_day
from sweeper.plan.request import Problem
from sweeper.ui.format import count, format_number
from sweeper.ui.tables import draw, terminal_width
from workloads.planner.bands import find_band
from workloads.planner.estimate import JobEstimate, StageMemory, StepTime
from workloads.planner.search import USABLE_MEMORY, Candidate
from workloads.planner.words import describe, layout_words, write_words

MISSING = "—"


def show(answer: Answer) -> None:
    """Print the answer."""
    job, cluster = answer.problem.job, answer.problem.cluster
    band = find_band(job)
    error_share, unsure = band.error_share, band.missing(job, cluster)
    at_least = "at least " if unsure else ""
    console = Console(width=terminal_width(), highlight=False, markup=False, emoji=False)
    for line in _describe_problem(answer):
        console.print(line, soft_wrap=True)
    console.print()
    for line in _describe_best(answer.best, answer.problem, error_share):
        console.print(line, soft_wrap=True)
    console.print(draw(*_parts(answer.best.estimate, error_share), 3, console.width))
    console.print(draw(*_layouts(answer, error_share), 3, console.width))
    questions = (_describe_comparison, _describe_alternatives, _describe_training)
    for line in (line for question in questions for line in question(answer, error_share)):
        console.print(line, soft_wrap=True)
    console.print(
        f"band      {at_least}{error_share:.0%}: 90% of {band.runs} published runs are within it, each estimated by "
        "what other sources show (benchmarks/results/planner.md)",
        soft_wrap=True,
    )
    for line in (*unsure, *answer.best.estimate.not_modelled):
        console.print(f"unsure    {line}", soft_wrap=True)


def round_to_band(value: float, error_share: float) -> str:
    """Return the value with the digits that its band allows: 1,152 within 8% is 1,150."""
    if not value or not math.isfinite(value):
        return format_number(value)
    digits = max(0, -math.floor(math.log10(max(error_share, 1e-4)))) + 1
    magnitude = math.floor(math.log10(abs(value)))
    rounded = round(value, digits - 1 - magnitude)
    decimals = max(0, digits - 1 - magnitude)
    return f"{rounded:,.{decimals}f}"


def _describe_problem(answer: Answer) -> list[str]:
    problem, result = answer.problem, answer.result
    job, cluster = problem.job, problem.cluster
    topology, device = cluster.topology, cluster.device
    tokens = job.layout.global_batch * job.sequence_length
    wiring = {"switch": "a switch", "pairs": "links between pairs", "host": "the processors"}[topology.wiring]
    lines = [
        f"train     {job.trainer}, {job.precision}, {job.state} state; {count(job.layout.global_batch, 'sequence')} of "
        f"{job.sequence_length:,} tokens a step ({tokens / 1e6:.3g} M tokens)",
        f"cluster   {cluster.gpus:,} x {device.name} ({device.memory_gib:.0f} GiB); {topology.name}: "
        f"{topology.gpus_per_domain} GPUs over {wiring} at {topology.link_gb_s:g} GB/s, "
        f"{topology.network_gb_s:g} GB/s of network for each GPU",
        f"searched  {result.estimated + result.too_large + result.slower:,} valid layouts: {result.too_large:,} do not "
        f"fit, {result.slower:,} are slower by a bound",
    ]
    if problem.given:
        lines.append(f"given     {write_words(dict(sorted(problem.given.items())))}")
    return lines


def _describe_best(best: Candidate, problem: Problem, error_share: float) -> list[str]:
    estimate, device = best.estimate, problem.cluster.device
    step_s = estimate.step.total_s
    mfu = MISSING if estimate.mfu is None else f"{100 * estimate.mfu:.0f}%"
    low, high = (round_to_band(step_s * factor, error_share) for factor in (1 - error_share, 1 + error_share))
    rate = round_to_band(estimate.tokens_per_s_per_gpu, error_share)
    memory = estimate.memory
    return [
        f"best      {describe(best.layout)}",
        f"          step {round_to_band(step_s, error_share)} s ({low} to {high}), {rate} tokens/s per GPU, MFU {mfu}, "
        f"{tokens_of_a_day(estimate) / 1e9:.2g} G tokens a day",
        f"          memory {memory.total_gib:.0f} GiB of {USABLE_MEMORY * device.memory_gib:.0f} usable; the framework "
        f"reports {memory.allocated_gib:.0f} allocated, {memory.reserved_gib:.0f} reserved",
    ]


def _parts(estimate: JobEstimate, error_share: float) -> tuple[list[str], list[list[str]]]:
    """Return the table of where the time and the memory go, side by side."""
    step, memory = estimate.step, estimate.memory
    times = [(item.name, getattr(step, item.name)) for item in fields(StepTime)]
    times = sorted((pair for pair in times if pair[1] > 0), key=lambda pair: -pair[1])
    sizes = [(item.name, getattr(memory, item.name)) for item in fields(StageMemory)]
    sizes = sorted((pair for pair in sizes if pair[1] > 0), key=lambda pair: -pair[1])
    rows = []
    for index in range(max(len(times), len(sizes))):
        row = ["", "", "", "", ""]
        if index < len(times):
            name, seconds = times[index]
            row[:3] = [name, round_to_band(1e3 * seconds, error_share), f"{100 * seconds / step.total_s:.0f}"]
        if index < len(sizes):
            row[3:] = [sizes[index][0], f"{sizes[index][1]:.1f}"]
        rows.append(row)
    return ["step", "ms", "%", "memory of a GPU", "GiB"], rows


def _layouts(answer: Answer, error_share: float) -> tuple[list[str], list[list[str]]]:
    """Return the table of the fastest layouts, with the fields in which they differ."""
    shown = answer.result.best[:SHOWN]
    best_s = answer.best.estimate.step.total_s
    fields_of = [layout_words(candidate.layout) for candidate in shown]
    varying = [name for name in fields_of[0] if len({values[name] for values in fields_of}) > 1]
    rows = []
    for values, candidate in zip(fields_of, shown, strict=True):
        estimate = candidate.estimate
        slower = 100 * (estimate.step.total_s / best_s - 1)
        rows.append(
            [
                *(values[name] for name in varying),
                round_to_band(estimate.step.total_s, error_share),
                round_to_band(estimate.tokens_per_s_per_gpu, error_share),
                MISSING if estimate.mfu is None else f"{100 * estimate.mfu:.0f}",
                f"{estimate.memory.total_gib:.0f}",
                f"{slower:.1f}",
            ]
        )
    return [*varying, "step s", "tokens/s per GPU", "MFU %", "GiB", "slower %"], rows


def _describe_comparison(answer: Answer, error_share: float) -> list[str]:
    if answer.faster is None or answer.comparison is None:
        return []
    comparison = answer.comparison
    told = "" if comparison.slower_share > error_share else "; within the band of an estimate, so measure both"
    total_s = answer.faster.estimate.step.total_s
    large = {name: seconds for name, seconds in comparison.parts_s.items() if abs(seconds) > 0.005 * total_s}
    return [
        f"slower    by {100 * comparison.slower_share:.0f}% than {describe(answer.faster.layout)}{told}",
        f"          {comparison.sentences}",
        f"          {', '.join(f'{name} {1e3 * seconds:+,.0f} ms' for name, seconds in large.items())}",
    ]


def _describe_alternatives(answer: Answer, error_share: float) -> list[str]:
    rate = answer.best.estimate.tokens_per_s_per_gpu
    lines = []
    for name, candidate in answer.alternatives.items():
        gain = candidate.estimate.tokens_per_s_per_gpu / rate - 1
        is_same = describe(candidate.layout) == describe(answer.best.layout)
        changed = "" if is_same else f", then with {describe(candidate.layout)}"
        if round(100 * gain):
            lines.append(f"with      {name}: {100 * gain:+.0f}%{changed}")
    return lines or ["with      twice the links, the network or the batch: no more than 1%"]


def _describe_training(answer: Answer, error_share: float) -> list[str]:
    training = answer.training
    if training is None:
        return []
    cost = "" if training.cost is None else f", cost {round_to_band(training.cost, error_share)}"
    return [
        f"training  {round_to_band(training.days, error_share)} days, "
        f"{round_to_band(training.gpu_hours, error_share)} GPU-hours{cost}; {100 * training.lost_share:.1f}% of it is "
        f"lost to {round_to_band(training.failures, error_share)} failures and to checkpoints"
    ]
