"""Find out what slows down a training run, using only its logs.

    python -m sweeper diagnose train.log
    python -m sweeper diagnose rank*.log model=llama3_8b hardware=h100 gpus=64

Reads the same logs as `sweeper ingest`, and other programs' lines such as `step 7 loss 2.5 80 ms/step`. A log without
step times needs a rate in each step's line, such as tokens/s. Reports gradual slowdowns, jumps in step time, temporary
slow phases, and periodic or irregular pauses. Also reports ranks and hosts that are slower than the rest and, with
model=, hardware= and gpus=, steps that are slower than the plan of the log's layout by more than the plan's error band.
The exit code is 0 if nothing is unusual, 1 if there is a finding, and 3 if there are too few steps for a verdict or the
log cannot be compared with a plan.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import median

import numpy as np

from sweeper.cli.command import Subcommand, words
from sweeper.cli.exits import COMPLETE, NO_VERDICT, SOME_FAILED
from sweeper.commands.ingest.imported import drop_warmup
from sweeper.commands.ingest.readers import LOG_FORMAT, detect_format
from sweeper.commands.plan.answer import NothingFits, search
from sweeper.commands.plan.request import PlanRequest, build_problem
from sweeper.common.format import count, format_number, name_some, one_line
from sweeper.metrics.derivation import MEMORY_METRICS
from sweeper.metrics.step_series import FEWEST, WORTH, Finding, compare_sources, find_slow_sources, find_unusual
from workloads.api.errors import UserInputError
from workloads.estimator.estimate import find_band
from workloads.formats.logs import LONGEST_LINE, Step, find_source
from workloads.formats.rate_lines import CommonLogReader
from workloads.layouts.layout import write_words
from workloads.tables import read_toml

TIME = "step_time_s"
# Rates that replace missing times: steps do equal work, so the inverse of a rate changes as the time does.
RATES = {
    "tokens_per_s": "tokens/s",
    "tokens_per_s_per_gpu": "tokens/s per GPU",
    "samples_per_s": "samples/s",
    "tflops_per_gpu": "TFLOP/s per GPU",
}
COARSE = 0.2  # timestamps that give a step's time with a larger relative error are not used if there is a rate
KEPT_LINES = 100  # number of lines before a step that are searched for the cause of a pause
WORTH_OF_RANK = 0.04  # the smallest slowdown, by its 95% interval, of one rank or host during a run
EARLY = 0.9  # a rank or host that ends before this share of the steps has ended early
PARTS, Z_RESTART = 10, 5.0  # parts of a start whose means are compared, and the limit of the comparison
GROWTH = 0.02  # memory growth of more than this fraction explains a drift in step time
TEXTS: dict[str, dict[str, str]] = read_toml(__file__, "findings.toml")
PAUSES = {name: re.compile(pattern, re.IGNORECASE) for name, pattern in TEXTS["pause"].items()}


@dataclass(frozen=True, kw_only=True)
class DiagnoseRequest:
    """The logs of one training run: a single log, or one per rank.

    Attributes:
        model: the trained model, to compare with a plan: a name, or the path of a config.json.
        hardware: name of the GPU in conf/hardware.
        gpus: number of GPUs.
    """

    logs: list[str] = field(metadata=words("LOG", least=1))
    model: str | None = None
    hardware: str | None = None
    gpus: int | None = field(default=None, metadata={"min": 1})


@dataclass
class Source:
    """The steps of one rank or host, or of a log without rank or host prefixes."""

    name: str
    path: Path
    reader: CommonLogReader = field(default_factory=CommonLogReader)
    steps: list[Step] = field(default_factory=list)
    before: list[list[str]] = field(default_factory=list)  # the lines from all sources before each step
    last: int = 0  # the line number of the last step
    measure: str = TIME  # the printed metric from which the steps' times are computed

    def feed(self, line: str, number: int, recent: Sequence[tuple[int, str]]) -> bool:
        """Read a line; return whether it ends a step. `recent` holds the number and text of earlier non-step lines."""
        step = self.reader.feed(line)
        if step and any(_is_usable(step, name) for name in (TIME, *RATES)):
            self.steps.append(step)
            self.before.append([text for at, text in recent if at > self.last])
        self.last = number if step else self.last
        return step is not None

    def compute_times(self, measure: str) -> Source:
        """Return the source with only the steps that print `measure`. A rate's inverse becomes the time."""
        pairs = [pair for pair in zip(self.steps, self.before, strict=True) if _is_usable(pair[0], measure)]
        power = 1 if measure == TIME else -1
        steps = [replace(step, metrics={**step.metrics, TIME: step.metrics[measure] ** power}) for step, _ in pairs]
        return replace(self, steps=steps, before=[lines for _, lines in pairs], measure=measure)

    def select(self) -> Source:
        """Return the source with only the steps after the warm-up, from the process start that ran the most steps."""
        starts = [step.start for step in self.steps]
        longest = max(dict.fromkeys(starts), key=starts.count)
        kept = [number for number, start in enumerate(starts) if start == longest]
        times_s = tuple(self.steps[number].metrics[TIME] for number in kept)
        kept = kept[len(kept) - len(drop_warmup(times_s)) :]
        return replace(self, steps=[self.steps[n] for n in kept], before=[self.before[n] for n in kept])

    @property
    def interval(self) -> int:
        """The number of steps from one printed step to the next."""
        numbers = [step.number for step in self.steps]
        return max(1, round(float(np.median(np.diff(numbers))))) if len(numbers) > 1 else 1

    @property
    def times_s(self) -> dict[int, float]:
        return {step.number: step.metrics[TIME] for step in self.steps}


def _is_usable(step: Step, metric: str) -> bool:
    return 0 < step.metrics.get(metric, 0) < math.inf


def diagnose(request: DiagnoseRequest) -> int:
    """Print unusual behavior found in the logs, and return the exit code."""
    of_plan = {name: getattr(request, name) for name in ("model", "hardware", "gpus")}
    given = {name: value for name, value in of_plan.items() if value is not None}
    missing = [f"{name}=" for name in of_plan if name not in given]
    if given and missing:
        raise UserInputError(f"{write_words(given)}: a comparison with a plan also needs {' and '.join(missing)}")
    sources = read_sources([Path(log) for log in request.logs])
    first, starts, found = examine(sources)
    usual_s = median(first.times_s.values())
    several = f" of {len(sources)} ranks or hosts" if len(sources) > 1 else ""
    program = f" of {first.reader.kind}" if first.reader.kind else ""
    of_start = f" of the longest of {starts} starts" if starts > 1 else ""
    steps = f"{count(len(first.steps), 'step')}{program} after the warm-up{of_start}"
    speed = f"{format_number(1 / usual_s)} {RATES[first.measure]}" if first.measure in RATES else ""
    print(f"{', '.join(request.logs)}: {steps}{several}, {speed or f'{format_number(usual_s)} s each'}")
    if without := [log for log in request.logs if Path(log) not in {source.path for source in sources}]:
        print(f"  without a step's time or rate: {name_some(without)}")
    is_open = len(first.steps) < FEWEST
    if not missing:
        planned, is_slower = compare_with_plan(request, usual_s, first.measure)
        if is_slower:
            found.append(planned)
        else:
            print(f"  {planned}")
        is_open = is_open or is_slower is None
    for text in found:
        print(f"! {one_line(text)}")
    if len(first.steps) < FEWEST:
        print(f"  fewer than {FEWEST} steps: too few to show a drift, a jump or pauses")
    elif not found:
        print("  nothing unusual")
    return SOME_FAILED if found else NO_VERDICT if is_open else COMPLETE


def examine(whole: Sequence[Source]) -> tuple[Source, int, list[str]]:
    """Return the source with the most steps in one start, that start alone; its number of starts; and all findings."""
    sources = [source.select() for source in whole]
    longest = max(range(len(sources)), key=lambda n: len(sources[n].steps))
    first, starts = sources[longest], len({step.start for step in whole[longest].steps})
    found = [*describe_unusual(first), *describe_ends(whole), *describe_sources(sources)]
    return first, starts, [*found, *describe_losses(whole[longest]), *describe_starts(whole[longest])]


def read_sources(paths: Sequence[Path], *, labelled: bool = True) -> list[Source]:
    """Return a source for each rank, host or log. Raises UserInputError for files that are not logs with step times."""
    sources: dict[str, Source] = {}
    labels: list[tuple[str, int]] = []  # of each step, with the step's number
    is_unique = len({path.name for path in paths}) == len(paths)
    for path in paths:
        recent = deque[tuple[int, str]](maxlen=KEPT_LINES)
        with path.open(errors="replace") as lines:
            for number, line in enumerate(iter(lambda: lines.readline(LONGEST_LINE), ""), start=1):
                label = find_source(line) if labelled else ""
                name = f"{path.name if is_unique else path} {label}".strip() if len(paths) > 1 else label
                source = sources.setdefault(name, Source(name, path))
                if not source.feed(line, number, recent):
                    recent.append((number, line))
                elif source.steps:
                    labels.append((label, source.steps[-1].number))
    if labelled and len(paths) == 1 and _are_counters(labels):
        return read_sources(paths, labelled=False)
    measure = choose_measure([step for source in sources.values() for step in source.steps])
    with_steps = [source for one in sources.values() if (source := one.compute_times(measure)).steps]
    if not with_steps:
        detect_format(paths[0], [LOG_FORMAT])  # raises if the file is of another kind
        names = ", ".join(map(str, paths))
        has_bar = any(source.reader.has_progress_bar for source in sources.values())
        bar = "; the times of a progress bar are averages" if has_bar else ""
        example = f"such as 80 ms/step, 2 it/s or 900 tokens/s{bar}"
        raise UserInputError(f"{names}: no line has a step's time or rate, {example}")
    return with_steps


def choose_measure(steps: Sequence[Step]) -> str:
    """Return the time if most steps have a precise one, else the rate that most steps print, else the time."""

    def is_precise(step: Step) -> bool:
        return TIME in step.metrics and not (step.is_by_clock and step.resolution_s > COARSE * step.metrics[TIME])

    counts = {name: sum(name in step.metrics for step in steps) for name in RATES}
    is_timed = sum(map(is_precise, steps)) > len(steps) / 2 or not any(counts.values())
    return TIME if is_timed else max(counts, key=counts.__getitem__)


def _are_counters(labels: Sequence[tuple[str, int]]) -> bool:
    """Return whether labels count steps or epochs: they are the steps' numbers, or each has its lines in one piece."""
    names = [label for label, _ in labels]
    pieces = sum(one != other for one, other in pairwise(names)) + 1
    are_numbers = sum(label == str(number) for label, number in labels) > len(labels) / 2
    return are_numbers or (len(set(names)) > 1 and pieces == len(set(names)))


def describe_unusual(source: Source) -> Iterator[str]:
    """Yield a line for each finding in the step times, including the likely cause."""
    times_s = source.times_s
    every = 1 if source.reader.kind else source.interval  # known trainers print the mean since the last printed step
    shares = [step.resolution_s / step.metrics[TIME] for step in source.steps if source.measure == TIME]
    resolution = median(shares) if shares else 0.0
    for finding in find_unusual(list(times_s), list(times_s.values()), every, resolution):
        yield f"{describe_finding(finding)}. Likely: {find_cause(source, finding)}"


def describe_finding(finding: Finding) -> str:
    place, bounds = f"steps {finding.first} to {finding.last}", f"(95% {finding.low:.1%} to {finding.high:.1%})"
    slow = len(finding.places)
    return TEXTS["finding"][finding.kind].format(finding=finding, bounds=bounds, place=place, slow=slow)


def find_cause(source: Source, finding: Finding) -> str:
    """Return the likely cause: an event printed before the slow steps, growing memory, or the most common cause."""
    for name, pattern in PAUSES.items():
        named = sum(any(pattern.search(line) for line in source.before[place]) for place in finding.places)
        if finding.places and named > len(finding.places) / 2:
            return f"{name}, printed before {named} of {len(finding.places)}"
    printed = next((name for name in MEMORY_METRICS if name in source.steps[0].metrics), "")
    memory = [step.metrics.get(printed, 0.0) for step in source.steps] if printed else []
    third = len(memory) // 3
    if finding.kind == "drift" and third and median(memory[-third:]) > (1 + GROWTH) * median(memory[:third]):
        grown = f"{median(memory[:third]):.1f} to {median(memory[-third:]):.1f} GiB"
        return f"memory that grows from {grown}: it fragments, or something is kept between steps"
    return TEXTS["cause"][finding.kind]


def describe_ends(sources: Sequence[Source]) -> Iterator[str]:
    """Yield a line for each rank or host whose steps, in any start, end before those of the others."""
    last = max(source.steps[-1].number for source in sources)
    for source in sources:
        own = source.steps[-1].number
        if source.name and len(source.steps) >= FEWEST / 2 and own + 2 * source.interval < EARLY * last:
            yield f"ended source: {source.name} ends at step {own}, others at {last}"


def describe_sources(sources: Sequence[Source]) -> Iterator[str]:
    """Yield a line for each rank or host that is slower than the others, or becomes slower than they are."""
    last = max(source.steps[-1].number for source in sources)
    series = {source.name: source.times_s for source in sources if source.steps[-1].number >= EARLY * last}
    compared = compare_sources(series)
    slow = find_slow_sources(compared)
    for name, finding in slow.items():
        longer = f"{finding.share:.1%} longer than the others (95% {finding.low:.1%} to {finding.high:.1%})"
        text = f"slow source: {name or 'lines without a rank'} takes {longer}"
        yield f"{text}. Likely: its GPU, its host or its links; sweeper accept measures each alone"
    for name, ratios in ({} if slow else compared).items():
        for finding in find_unusual(list(ratios), list(ratios.values())):
            # Each of many ranks has a chance of a false alarm, so a finding must be large and last.
            if finding.kind in ("drift", "jump") and finding.low > WORTH_OF_RANK:
                yield f"slow source: {name or 'lines without a rank'} against the others: {describe_finding(finding)}"


def describe_losses(source: Source) -> Iterator[str]:
    """Yield a line if a loss is NaN or infinite."""
    losses = {step.number: step.metrics["loss"] for step in source.steps if "loss" in step.metrics}
    if bad := [number for number, loss in losses.items() if not math.isfinite(loss)]:
        yield f"loss: it is {losses[bad[0]]:g} in {len(bad)} of {count(len(losses), 'step')}, first in step {bad[0]}"


def describe_starts(source: Source) -> Iterator[str]:
    """Yield a line if the last start is slower than the longest."""
    starts = [step.start for step in source.steps]
    longest, last = max(dict.fromkeys(starts), key=starts.count), starts[-1]
    times_s = [[step.metrics[TIME] for step in source.steps if step.start == n] for n in (longest, last)]
    if last <= longest or len(times_s[1]) < FEWEST:
        return
    # Block means show how much the times of each start differ by themselves.
    before, after = ([math.log(part.mean()) for part in np.array_split(drop_warmup(tuple(t)), PARTS)] for t in times_s)
    change, error = np.mean(after) - np.mean(before), math.hypot(np.std(before), np.std(after)) / math.sqrt(PARTS)
    if change > math.log1p(WORTH) and change > Z_RESTART * error:
        slower = f"steps are slower by {math.expm1(change):.1%}"
        yield f"restart: {slower} since start {last + 1} than in start {longest + 1}"


def compare_with_plan(request: DiagnoseRequest, usual_s: float, measure: str) -> tuple[str, bool | None]:
    """Compare a step's time with the plan of the log's layout. Return a note, and whether the time exceeds the band, or
    None if the log has no layout to compare with. Raises UserInputError if a given value is wrong."""
    model, hardware = str(request.model), str(request.hardware)
    try:
        problem = build_problem(PlanRequest(model=model, hardware=hardware, gpus=request.gpus, layout=request.logs[0]))
        best = search(problem, keep=1).best[0]
    except UserInputError as error:
        if str(error).partition("=")[0] in ("model", "hardware", "gpus") and not isinstance(error, NothingFits):
            raise
        return f"not compared with a plan: {error}", None
    batch, tokens = problem.job.layout.global_batch, problem.job.layout.global_batch * problem.job.sequence_length
    work = {TIME: 1.0, "samples_per_s": batch, "tokens_per_s": tokens}
    work["tokens_per_s_per_gpu"] = tokens / problem.cluster.gpus
    if measure not in work:
        return f"not compared with a plan: the log has {RATES[measure]}, but no step times and no tokens/s", None
    step_s = work[measure] * usual_s
    planned_s, ends = best.estimate.step.total_s, find_band(problem.job, problem.cluster).ends
    slowest_s = planned_s / (1 - ends.below)
    is_slower = step_s > slowest_s
    planned = f"{format_number(planned_s)} planned, up to {format_number(slowest_s)} in its band"
    shown = f"{format_number(step_s)} s a step, {planned}"
    return f"slower than the plan: {shown}" if is_slower else f"within the plan's band: {shown}", is_slower


COMMAND = Subcommand("diagnose", __doc__, {"": (DiagnoseRequest, diagnose)})
main = COMMAND.main
