"""What a person sees while a sweep runs. Everything goes to standard error; results are not shown here."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from sweeper.common.metrics import unit_of
from sweeper.common.trials import TrialRecord, TrialStatus
from sweeper.ui.tables import said, said_counts, said_point

HEARTBEAT_S = 10.0
LINES_APART_S = 1.0


@dataclass(frozen=True)
class State:
    """Where a sweep stands."""

    counts: Mapping[TrialStatus, int]
    trials: int | None  # the budget
    running: int
    elapsed_s: float
    left_s: float | None  # None: not known yet
    best: TrialRecord | None
    objective: str
    workers: Callable[[int], list[str]] = lambda _: []  # what each of so many gangs is at, if anybody wants to know
    gangs: int = 0
    trouble: str = ""
    starting: bool = False  # no worker is up yet
    stopping: bool = False
    finals: tuple[int, int] | None = None  # how many of the finalists' trials have ended, and of how many

    @property
    def ended(self) -> int:
        return sum(count for status, count in self.counts.items() if status is not TrialStatus.CANCELLED)


class Progress:
    """No progress at all: `progress=never`. Also what the others have in common: notes are always shown."""

    def __init__(self) -> None:
        self.console = Console(stderr=True, highlight=False, soft_wrap=True)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def note(self, text: str) -> None:
        """A line that a person has to see whatever the setting."""
        self.console.print(text, markup=False)

    def update(self, state: State, ended: TrialRecord | None = None, better: bool = False) -> None:
        """The state has changed: a trial has ended, and was better than all before. Or only time has passed."""

    def end(self, result: dict[str, object]) -> None:
        """The sweep has ended so: for programs."""


class Lines(Progress):
    """A line on each change, at most one a second but for failures and new bests, and a heartbeat."""

    def __init__(self) -> None:
        super().__init__()
        self._last_s = 0.0
        self._unsaid = ""

    def __exit__(self, *_: object) -> None:
        if self._unsaid:
            self.note(self._unsaid)

    def update(self, state: State, ended: TrialRecord | None = None, better: bool = False) -> None:
        now = time.monotonic()
        failed = ended is not None and ended.status is not TrialStatus.COMPLETE
        if not (better or failed) and now - self._last_s < (LINES_APART_S if ended else HEARTBEAT_S):
            self._unsaid = f"[{_clock(state.elapsed_s)}] {_counted(state)}" if ended else self._unsaid
            return
        self._last_s, self._unsaid = now, ""
        line = f"[{_clock(state.elapsed_s)}] {_counted(state)}"
        if ended is not None and failed:
            line += f"; trial {ended.number} {ended.status.value}: {ended.reason} ({said_point(ended.params)})"
        elif state.best and not state.finals:
            line += f"; {'new best' if better else 'best'} {_best(state)}"
        if state.starting:
            line += f"; {state.workers(1)[0]}"
        if state.trouble:
            line += f"; MLflow: {state.trouble}"
        self.note(line)


class Block(Progress):
    """One live block on a terminal, redrawn in place."""

    def __init__(self, force: bool = False) -> None:
        super().__init__()
        if force:
            self.console = Console(stderr=True, highlight=False, soft_wrap=True, force_terminal=True)

    def __enter__(self) -> Progress:
        # Standard output is kept out of it: it is Ray's at that time, and goes to a file.
        self._live = Live(console=self.console, refresh_per_second=8, transient=True, redirect_stdout=False)
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def update(self, state: State, ended: TrialRecord | None = None, better: bool = False) -> None:
        if ended is not None and ended.status not in (TrialStatus.COMPLETE, TrialStatus.CANCELLED):
            self.note(f"trial {ended.number} {ended.status.value}: {ended.reason} ({said_point(ended.params)})")
        self._live.update(self._drawn(state))

    def _drawn(self, state: State) -> Group:
        width = self.console.width
        lines = [Text(f"{_bar(state, min(24, width // 3))} {_counted(state)}", style="bold")]
        left = "" if state.left_s is None else f", about {_clock(state.left_s)} left"
        doing = "stopping: waiting for the trials in flight" if state.stopping else f"{state.running} in flight"
        lines.append(Text(f"{_clock(state.elapsed_s)} elapsed{left}; {doing}"))
        if state.best:
            lines.append(Text(f"best {_best(state)}", style="green"))
        room = max(1, self.console.height - 6)
        lines += [Text(worker, style="dim") for worker in state.workers(room)]
        if state.gangs > room:
            lines.append(Text(f"… and {state.gangs - room} more workers", style="dim"))
        if state.trouble:
            lines.append(Text(f"MLflow: {state.trouble} (results are kept)", style="yellow"))
        for line in lines:
            line.truncate(width, overflow="ellipsis")
        return Group(*lines)


class Json(Progress):
    """An object a line, for programs."""

    def note(self, text: str) -> None:
        self._print({"event": "note", "text": " ".join(text.split())})

    def update(self, state: State, ended: TrialRecord | None = None, better: bool = False) -> None:
        if ended is None:
            return
        self._print(
            {
                "event": "trial",
                "trial": ended.number,
                "outcome": ended.status.value,
                "reason": ended.reason,
                **(
                    {"again_of": ended.remeasurement.trial, "round": ended.remeasurement.round}
                    if ended.remeasurement
                    else {}
                ),
                "params": dict(ended.params),
                "metrics": dict(ended.metrics),
                "better": better,
                "ended": state.ended,
                "budget_trials": state.trials,
                "elapsed_s": round(state.elapsed_s, 3),
            }
        )

    def end(self, result: dict[str, object]) -> None:
        self._print({"event": "end", **result})

    def _print(self, event: dict[str, object]) -> None:
        print(json.dumps(event), file=sys.stderr, flush=True)


def make(setting: Literal["auto", "always", "never", "json"]) -> Progress:
    """The display for a setting; `auto` is a block on a terminal, else lines."""
    match setting:
        case "always":
            return Block(force=True)
        case "never":
            return Progress()
        case "json":
            return Json()
    console = Console(stderr=True)
    return Block() if console.is_terminal and not console.is_dumb_terminal else Lines()


def _counted(state: State) -> str:
    if state.finals:
        return f"finals: {state.finals[0]}/{state.finals[1]}"
    of = f"/{state.trials}" if state.trials else ""
    shown = {status: count for status, count in state.counts.items() if count}
    return f"{state.ended}{of} trials: {said_counts(shown)}" if shown else f"0{of} trials"


def _best(state: State) -> str:
    assert state.best is not None
    figure = f"{said(state.best.metrics[state.objective])} {unit_of(state.objective)}".strip()
    return f"{figure} at {said_point(state.best.params)}"


def _bar(state: State, width: int) -> str:
    if not state.trials:
        return ""
    ended, of = state.finals or (state.ended, state.trials)
    full = min(width, round(width * ended / of))
    return "█" * full + "░" * (width - full)


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
