"""An answer as lines and tables: the best layout, where its time and memory go, and what would change it."""

from __future__ import annotations

from dataclasses import fields

from sweeper.commands.plan.answer import KEPT, SHOWN, Answer, tokens_of_a_day
from sweeper.commands.plan.rounding import format_share, round_change, round_to_band
from sweeper.common.format import count
from workloads.estimator.bands import find_band
from workloads.estimator.estimate import JobEstimate, StageMemory, StepTime
from workloads.estimator.questions import Comparison
from workloads.estimator.search import USABLE_MEMORY, Candidate
from workloads.estimator.words import describe, layout_words, write_words
from workloads.models.model import find_trained_name

MISSING = "—"
INDENT = " " * 10  # before the text of each line; its first word stands there
Rows = tuple[list[str], list[list[str]]]


def list_sections(answer: Answer) -> list[tuple[str, list[str]]]:
    """Return the words of the first column with the lines beside them, without the tables."""
    sections: list[tuple[str, list[str]]] = []
    for line in [*head_lines(answer), *comparison_lines(answer), *tail_lines(answer)]:
        word, text = line[: len(INDENT)].strip(), line[len(INDENT) :]
        if word and not (sections and sections[-1][0] == word):
            sections.append((word, []))
        sections[-1][1].append(text)
    return sections


def head_lines(answer: Answer) -> list[str]:
    """Return what was searched, and the best layout."""
    error_share = find_band(answer.problem.job).error_share
    return _describe_problem(answer, error_share) + _describe_best(answer, error_share)


def comparison_lines(answer: Answer) -> list[str]:
    """Return why the given layout is slower than the fastest; nothing where it is the fastest."""
    if answer.faster is None or answer.comparison is None:
        return []
    return _describe_comparison(answer.faster, answer.comparison, find_band(answer.problem.job).error_share)


def tail_lines(answer: Answer) -> list[str]:
    """Return what would change the best layout, a whole training, and how far the estimate can be believed."""
    job, cluster = answer.problem.job, answer.problem.cluster
    band = find_band(job)
    unsure = band.missing(job, cluster)
    if answer.problem.calibration:
        unsure = [*unsure, "the band is that of estimates with the tables' rates, not with rates measured here"]
    reason = f"90% of {band.runs} published runs are within it, each estimated by what other sources show"
    return [
        *_describe_alternatives(answer),
        *_describe_training(answer, band.error_share),
        f"band      {'at least ' if unsure else ''}{band.error_share:.0%}: {reason} (benchmarks/results/planner.md)",
        *(f"unsure    {line}" for line in (*unsure, *_describe_untrained(answer), *answer.best.estimate.not_modelled)),
    ]


def _describe_untrained(answer: Answer) -> list[str]:
    """Return that this project's trainer does not train the planned model, where it does not."""
    job = answer.problem.job
    if job.trainer != "own" or find_trained_name(job.model):
        return []
    return [
        f"workload=parallel does not train {answer.model}, which conf/model does not have: the plan is of a trainer "
        "like it; trainer= names another one"
    ]


def _describe_problem(answer: Answer, error_share: float) -> list[str]:
    problem, result = answer.problem, answer.result
    job, cluster = problem.job, problem.cluster
    topology, device = cluster.topology, cluster.device
    tokens = job.layout.global_batch * job.sequence_length
    eager = "" if job.compiled else ", not compiled"
    wiring = {"switch": "a switch", "pairs": "links between pairs", "host": "the processors"}[topology.wiring]
    found = result.estimated + result.slower
    slower = f", {found - len(result.best):,} are slower than the best {len(result.best)}" if found > KEPT else ""
    lines = [
        f"train     {answer.model} by {job.trainer}, {job.precision}, {job.state} state{eager}; "
        f"{count(job.layout.global_batch, 'sequence')} of {job.sequence_length:,} tokens a step "
        f"({tokens / 1e6:.3g} M tokens)",
        f"cluster   {cluster.gpus:,} x {device.name} ({device.memory_gib:.0f} GiB); {topology.name}: "
        f"{topology.gpus_per_domain} GPUs over {wiring} at {topology.link_gb_s:g} GB/s, "
        f"{topology.network_gb_s:g} GB/s of network for each GPU",
        f"searched  {found + result.too_large:,} valid layouts: {result.too_large:,} do not fit{slower}",
    ]
    if problem.calibration:
        lines.append(f"rates     {problem.calibration.describe()}")
    if problem.correction:
        lines.append(f"measured  {problem.correction.describe()}")
    if problem.given:
        lines.append(f"given     {write_words(dict(sorted(problem.given.items())))}")
    if answer.rates:
        *fewer, last = (
            f"{gpus:,} GPUs {round_to_band(rate / 1e9, error_share)} G" for gpus, rate in answer.rates.items()
        )
        lines.append(f"reached   by {last} tokens a day" + (f"; too few are {fewer[-1]}" if fewer else ""))
    return lines


def _describe_best(answer: Answer, error_share: float) -> list[str]:
    best, device = answer.best, answer.problem.cluster.device
    estimate = best.estimate
    step_s = estimate.step.total_s
    mfu = MISSING if estimate.mfu is None else f"{100 * estimate.mfu:.0f}%"
    low, high = (round_to_band(step_s * factor, error_share) for factor in (1 - error_share, 1 + error_share))
    rate = round_to_band(estimate.tokens_per_s_per_gpu, error_share)
    memory = estimate.memory
    return [
        f"best      {describe(best.layout)}",
        f"          step {round_to_band(step_s, error_share)} s ({low} to {high}), {rate} tokens/s per GPU, MFU {mfu}, "
        f"{round_to_band(tokens_of_a_day(estimate) / 1e9, error_share)} G tokens a day",
        f"          memory {memory.total_gib:.0f} GiB of {USABLE_MEMORY * device.memory_gib:.0f} usable; the framework "
        f"reports {memory.allocated_gib:.0f} allocated, {memory.reserved_gib:.0f} reserved",
    ]


def parts_table(estimate: JobEstimate, error_share: float) -> Rows:
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
            row[:3] = [name, round_to_band(1e3 * seconds, error_share), format_share(seconds / step.total_s)]
        if index < len(sizes):
            row[3:] = [sizes[index][0], f"{sizes[index][1]:.1f}"]
        rows.append(row)
    return ["step", "ms", "%", "memory of a GPU", "GiB"], rows


def layouts_table(answer: Answer, error_share: float) -> Rows:
    """Return the table of the fastest layouts, with the fields in which they differ."""
    shown = answer.result.best[:SHOWN]
    best_s = answer.best.estimate.step.total_s
    fields_of = [layout_words(candidate.layout) for candidate in shown]
    varying = [name for name in fields_of[0] if len({values[name] for values in fields_of}) > 1]
    rows = []
    for values, candidate in zip(fields_of, shown, strict=True):
        estimate = candidate.estimate
        rows.append(
            [
                round_to_band(estimate.step.total_s, error_share),
                f"{100 * (estimate.step.total_s / best_s - 1):.1f}",
                MISSING if estimate.mfu is None else f"{100 * estimate.mfu:.0f}",
                f"{estimate.memory.total_gib:.0f}",
                write_words({name: values[name] for name in varying}),
            ]
        )
    return ["step s", "slower %", "MFU %", "GiB", "layout, where they differ"], rows


def _describe_comparison(faster: Candidate, comparison: Comparison, error_share: float) -> list[str]:
    told = "" if comparison.slower_share > error_share else "; within the band of an estimate, so measure both"
    return [
        f"slower    by {format_share(comparison.slower_share)}% than {describe(faster.layout)}{told}",
        f"{INDENT}{comparison.sentences}",
    ]


def differences_table(given: Candidate, faster: Candidate, error_share: float) -> Rows:
    """Return the table of where the steps of a given layout and of a faster one differ."""
    pairs = {item.name: _milliseconds(item.name, given, faster) for item in fields(StepTime)}
    pairs = dict(sorted(pairs.items(), key=lambda item: item[1][1] - item[1][0]))
    pairs["step"] = _milliseconds("total_s", given, faster)
    rows = [
        [name, *(round_to_band(value, error_share) for value in pair), round_change(pair[0] - pair[1], error_share)]
        for name, pair in pairs.items()
        if any(pair)
    ]
    return ["ms", "given", "fastest", "difference"], rows


def _milliseconds(name: str, *candidates: Candidate) -> tuple[float, ...]:
    return tuple(1e3 * getattr(candidate.estimate.step, name) for candidate in candidates)


def _describe_alternatives(answer: Answer) -> list[str]:
    rate = answer.best.estimate.tokens_per_s_per_gpu
    lines = []
    for name, candidate in answer.alternatives.items():
        gain = candidate.estimate.tokens_per_s_per_gpu / rate - 1
        is_same = describe(candidate.layout) == describe(answer.best.layout)
        changed = "" if is_same else f", then with {describe(candidate.layout)}"
        if round(100 * gain):
            lines.append(f"with      {name}: {100 * gain:+.0f}%{changed}")
    return lines or [f"with      {', '.join(answer.alternatives)}: no more than 1%"]


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
