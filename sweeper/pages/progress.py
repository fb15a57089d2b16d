"""Show the progress of a running sweep. All output goes to standard error. Results are printed elsewhere."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from sweeper.common.format import format_duration, format_number, format_point, printable
from sweeper.common.trials import TrialRecord, TrialStatus
from sweeper.pages.terminal import wrap_line
from sweeper.pages.trial_tables import format_counts
from workloads.api.metrics import METRICS, get_metric

HEARTBEAT_S = 10.0
MIN_BETWEEN_LINES_S = 1.0
SHOWN_OF_FRONT = 8  # how many trials of the front a block shows
CELL = (100, 24)  # the columns and lines of a notebook cell


@dataclass(frozen=True)
class ProgressState:
    counts: Mapping[TrialStatus, int]
    trials: int | None  # the trial budget; None means no limit
    running: int
    waiting: int  # trials queued behind the current trial of a worker
    elapsed_s: float
    remaining_s: float | None  # estimated time until the budget is used up; None while unknown
    best: TrialRecord | None
    objectives: Sequence[str]  # the objectives' metrics, the leading objective first
    describe_workers: Callable[[int], list[str]] = lambda _: []  # describes each of the first N gangs
    gangs: int = 0
    tracking_error: str = ""  # why results are not in MLflow; empty if they are recorded
    is_starting: bool = False  # no worker has started yet
    is_stopping: bool = False
    finals: tuple[int, int] | None = None  # finished and planned trials of the finals
    front: Sequence[TrialRecord] = ()  # with several objectives: its trials, sorted by the leading objective
    varying: Collection[str] = ()  # the parameters that differ between trials and are shown; empty for all
    limit: tuple[float, str] = (0.0, "")  # the used share of the budget, and the limit if it is not the trial count

    @property
    def ended(self) -> int:
        return sum(number for status, number in self.counts.items() if status is not TrialStatus.CANCELLED)

    def describe_counts(self) -> str:
        if self.finals:
            return f"finals: {self.finals[0]}/{self.finals[1]}"
        counts = f": {format_counts(self.counts)}" if any(self.counts.values()) else ""
        ended = f"{self.ended}{f'/{self.trials}' if self.trials else ''} trials"
        if self.trials and self.ended > self.trials:  # the budget was larger before
            ended = f"{self.ended} trials, above the budget of {self.trials}"
        return f"{ended}{counts}{f'; {self.limit[1]}' if self.limit[1] else ''}"

    def describe(self, record: TrialRecord) -> str:
        """Describe a trial's objectives and point. An objective without a unit is shown with its name."""
        names = self.objectives if self.front else self.objectives[:1]
        values = [f"{format_number(record.metrics[name])} {get_metric(name).unit or name}" for name in names]
        return f"{', '.join(values)} at {format_point(self.shorten(record))}"

    def describe_failure(self, record: TrialRecord) -> str:
        number = f"{record.number}{record.remeasurement or ''}"
        return f"trial {number} {record.status.value}: {record.reason} ({format_point(self.shorten(record))})"

    def shorten(self, record: TrialRecord) -> dict[str, Any]:
        """Return a trial's parameters, leaving out those that are equal in all trials."""
        return {name: value for name, value in record.params.items() if name in self.varying or not self.varying}


def describe_step(step: int, metrics: Mapping[str, float]) -> str:
    """Describe a running trial's step: `step 8, 1,234 tokens/s, MFU 45.1 %, 10.2 GiB, loss 2.31`."""
    texts = [f"step {step}"]
    in_order = [*(name for name in METRICS if name in metrics), *(name for name in metrics if name not in METRICS)]
    for metric, value in ((get_metric(name), metrics[name]) for name in in_order):
        is_plain = metric.unit in ("", "%") or metric.name not in METRICS
        name = metric.label or metric.name if is_plain else ""
        texts.append(f"{name} {format_number(value * metric.factor)} {metric.unit}".strip())
    return ", ".join(texts)


class Progress:
    """Shows only notes (`progress=never`). This is the base class of the other displays."""

    def __init__(self, force_terminal: bool | None = None) -> None:
        self.console = Console(stderr=True, highlight=False, soft_wrap=True, force_terminal=force_terminal)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def note(self, text: str) -> None:
        """Print lines that the user must see with any setting. Indented lines are commands and are not wrapped."""
        for line in printable(text).splitlines():
            is_command = line.startswith("  ")
            text = line if is_command else wrap_line(line, self.console.width, self.console.file)
            self.console.print(text, markup=False)

    def update(self, state: ProgressState, ended: TrialRecord | None = None, is_best: bool = False) -> None:
        """Show the state. `ended` is the trial that just ended, if any. With `is_best`, that trial is the new best."""

    def end(self, results: dict[str, object]) -> None:
        """Report the results to a program that reads the output."""


class Lines(Progress):
    """Prints a heartbeat and a line for each change: failures and new bests at once, others at most once a second."""

    def __init__(self) -> None:
        super().__init__()
        self._last_s = 0.0
        self._skipped: tuple[str, ProgressState] | None = None

    def __exit__(self, *_: object) -> None:
        if self._skipped:
            self._show(*self._skipped)

    def _show(self, line: str, state: ProgressState) -> None:
        self.note(line)

    def update(self, state: ProgressState, ended: TrialRecord | None = None, is_best: bool = False) -> None:
        now = time.monotonic()
        failed = ended is not None and ended.status is not TrialStatus.COMPLETE
        line = f"[{format_duration(state.elapsed_s)}] {state.describe_counts()}"
        if not (is_best or failed) and now - self._last_s < (MIN_BETWEEN_LINES_S if ended else HEARTBEAT_S):
            self._skipped = (line, state) if ended else self._skipped
            return
        self._last_s, self._skipped = now, None
        if ended is not None and failed:
            line += f"; {state.describe_failure(ended)}"
        elif state.front and not state.finals:
            new = f", new {state.describe(ended)}" if ended is not None and is_best else ""
            line += f"; front of {len(state.front)}{new}"
        elif state.best and not state.finals:
            line += f"; {'new best' if is_best else 'best'} {state.describe(state.best)}"
        if state.remaining_s is not None and not ended:  # only in a heartbeat
            line += f"; about {format_duration(state.remaining_s)} left"
        if state.is_starting:
            line += f"; {state.describe_workers(1)[0]}"
        if state.tracking_error:
            line += f"; MLflow: {state.tracking_error}"
        self._show(line, state)


class Block(Progress):
    """A live block on a terminal, redrawn in place."""

    def __enter__(self) -> Progress:
        # Do not redirect standard output, which at this point carries Ray's messages to a file.
        self._live = Live(console=self.console, refresh_per_second=8, transient=True, redirect_stdout=False)
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def update(self, state: ProgressState, ended: TrialRecord | None = None, is_best: bool = False) -> None:
        if ended is not None and ended.status not in (TrialStatus.COMPLETE, TrialStatus.CANCELLED):
            self.note(state.describe_failure(ended))
        self._live.update(Group(*draw_block(state, self.console.width, self.console.height)))


def draw_block(state: ProgressState, width: int, height: int) -> list[Text]:
    """Return the lines of the live view, for a terminal or notebook cell of this size."""
    bar = ""
    if state.finals or state.limit != (0.0, "") or state.trials:
        share = state.finals[0] / state.finals[1] if state.finals else state.limit[0]
        cells = min(24, width // 3)
        bar = f"{'█' * min(cells, round(cells * share)):░<{cells}} "
    remaining = "" if state.remaining_s is None else f", about {format_duration(state.remaining_s)} left"
    running = f"{state.running} running, {state.waiting} next"
    activity = "stopping: waiting for the running trials" if state.is_stopping else running
    lines = [
        Text(f"{bar}{state.describe_counts()}", style="bold"),
        Text(f"{format_duration(state.elapsed_s)} elapsed{remaining}; {activity}"),
    ]
    lines += [Text(f"front {state.describe(record)}", style="green") for record in state.front[:SHOWN_OF_FRONT]]
    if len(state.front) > SHOWN_OF_FRONT:
        lines.append(Text(f"… and {len(state.front) - SHOWN_OF_FRONT} more on the front", style="green"))
    if state.best and not state.front:
        lines.append(Text(f"best {state.describe(state.best)}", style="green"))
    room = max(1, height - 6 - min(len(state.front), SHOWN_OF_FRONT + 1))
    workers, shown = list[str](), 0
    for worker in state.describe_workers(room):
        if workers and len(workers) + len(worker.splitlines()) > room:
            break
        workers, shown = workers + worker.splitlines(), shown + 1
    workers += [f"… and {state.gangs - shown} more workers"] if state.gangs > shown else []
    lines += [Text(worker, style="dim") for worker in workers]
    if state.tracking_error:
        lines.append(Text(f"MLflow: {state.tracking_error} (results are kept)", style="yellow"))
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return lines


class Json(Lines):
    """Prints a JSON object per line: trials, and the line and the block that a terminal would show."""

    def note(self, text: str) -> None:
        self._print("note", {"text": " ".join(text.split())})

    def update(self, state: ProgressState, ended: TrialRecord | None = None, is_best: bool = False) -> None:
        if ended is None:
            super().update(state)
            return
        event = {
            "trial": ended.number,
            "objective": state.objectives[0],
            "outcome": ended.status.value,
            "reason": ended.reason,
            "described": state.describe_failure(ended),
            **ended.repeats,
            "params": dict(ended.params),
            "metrics": dict(ended.metrics),
            "is_best": is_best,
            **({"front": [record.number for record in state.front]} if state.front else {}),
            "ended": state.ended,
            "budget_trials": state.trials,
            "elapsed_s": round(state.elapsed_s, 3),
        }
        self._print("trial", event)
        super().update(state, ended, is_best)

    def _show(self, line: str, state: ProgressState) -> None:
        block = [str(text) for text in draw_block(state, *CELL)]
        self._print("progress", {"line": line, "block": block})

    def end(self, results: dict[str, object]) -> None:
        self._print("end", results)

    def _print(self, kind: str, event: Mapping[str, object]) -> None:
        print(json.dumps({"event": kind, **event}), file=sys.stderr, flush=True)


def make_progress(setting: Literal["auto", "always", "never", "json"]) -> Progress:
    """Return the display for this setting. `auto` draws a block on a terminal and prints lines elsewhere."""
    console = Console(stderr=True)
    if setting == "always" or (setting == "auto" and console.is_terminal and not console.is_dumb_terminal):
        return Block(force_terminal=setting == "always" or None)
    return {"auto": Lines, "never": Progress, "json": Json}[setting]()
