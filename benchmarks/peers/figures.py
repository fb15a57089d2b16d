"""The figures of a run, from what its trials have recorded and from the tool's own results."""

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.table import STEPS

Point = tuple[int, int]  # the two parameters of a trial


@dataclass(frozen=True)
class Trial:
    """One execution of a point."""

    point: Point
    start_s: float  # its first record
    last_s: float  # its last record, of the last step that it ran
    finished: bool  # it ran all its steps


@dataclass(frozen=True)
class Loss:
    """What a kill of the driver cost, in points that had finished before it."""

    finished: int  # points that had finished when the driver was killed
    repeated: int  # those of them that were started again afterwards
    missing: int  # those of them that the tool's results lack in the end
    absent: int  # points of the whole space that the results lack
    started_again: int  # trials that were started after the kill, of any point


def read_trials(path: Path) -> list[Trial]:
    """Return the trials in a file of records, in the order of their starts. A line that was cut off is left out."""
    events: dict[str, list[dict]] = {}
    for line in path.read_text().splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            continue
        events.setdefault(event["trial"], []).append(event)
    trials = []
    for records in events.values():
        times_s = [record["at_s"] for record in records]
        finished = sum(record["event"] == "step" for record in records) == STEPS
        trials.append(Trial((records[0]["a"], records[0]["b"]), min(times_s), max(times_s), finished))
    return sorted(trials, key=lambda trial: trial.start_s)


def span_s(trials: Sequence[Trial]) -> float:
    """Return the seconds from the first trial's start to the last one's end."""
    return max(trial.last_s for trial in trials) - min(trial.start_s for trial in trials)


def idle_share(trials: Sequence[Trial], workers: int) -> float:
    """Return the share of the workers' time in which no trial ran, between the first start and the last end."""
    busy_s = sum(trial.last_s - trial.start_s for trial in trials)
    return 1 - busy_s / (workers * span_s(trials))


def idle_parts(trials: Sequence[Trial], workers: int) -> tuple[float, float, float]:
    """Return the idle share in three parts: until all workers ran at once, between, and after the last start."""
    changes = sorted([(trial.start_s, 1) for trial in trials] + [(trial.last_s, -1) for trial in trials])
    last_start_s = max(trial.start_s for trial in trials)
    idle_s, running, part, before_s = [0.0, 0.0, 0.0], 0, 0, changes[0][0]
    for at_s, change in changes:
        idle_s[part] += (workers - running) * (at_s - before_s)
        running, before_s = running + change, at_s
        if at_s >= last_start_s:
            part = 2
        elif running >= workers:
            part = 1 if part == 0 else part
    start, between, end = (seconds / (workers * span_s(trials)) for seconds in idle_s)
    return start, between, end


def count_loss(trials: Sequence[Trial], killed_at_s: float, results: Iterable[Point], space: Iterable[Point]) -> Loss:
    """Return what was lost by a kill, where `results` are the points that the tool has a result of in the end."""
    finished = {trial.point for trial in trials if trial.finished and trial.last_s <= killed_at_s}
    again = [trial.point for trial in trials if trial.start_s > killed_at_s]
    present = set(results)
    return Loss(
        len(finished), len(finished & set(again)), len(finished - present), len(set(space) - present), len(again)
    )


def count_lines(paths: Iterable[Path]) -> int:
    """Return the lines that are neither empty nor only a comment."""
    lines = [line.strip() for path in paths for line in path.read_text().splitlines()]
    return sum(1 for line in lines if line and (not line.startswith("#") or line.startswith("# @package")))


def describe(values: Sequence[float], digits: int = 1) -> str:
    """Return the median, and the range unless all values are written alike."""
    median, least, most = (f"{of(values):.{digits}f}" for of in (statistics.median, min, max))
    return median if least == most else f"{median} ({least} to {most})"
