"""The progress of a sweep that another process runs, from its events: lines, or a block in a notebook's cell."""

import html
import math
import sys
from typing import Any

from sweeper.common.format import format_duration
from sweeper.pages.progress import describe_values, draw_bar, format_ended

BAR_WIDTH = 24
SHOWN_NOTES = 6


class EventDisplay:
    """The state of a sweep as its events tell it, printed as lines to standard error."""

    def note(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def event(self, event: dict[str, Any]) -> None:
        if event["event"] == "note":
            self.note(str(event["text"]))
        elif event["event"] == "trial":
            self._show(event)

    def _show(self, event: dict[str, Any]) -> None:
        if event["is_best"] or event["outcome"] not in ("complete", "cancelled"):
            self.note(self.describe(event))

    def describe(self, event: dict[str, Any]) -> str:
        line = f"[{format_duration(event['elapsed_s'])}] {format_ended(event['ended'], event['budget_trials'])}"
        if "remeasured_trial" in event:
            return f"{line}; finals: round {event['round']} of trial {event['remeasured_trial']}"
        if event["outcome"] != "complete":
            return f"{line}; trial {event['trial']} {event['outcome']}: {event['reason']}"
        return f"{line}; {'best so far' if event['is_best'] else 'last'} {describe_value(event)}"


def describe_value(event: dict[str, Any]) -> str:
    """Return the objective of a complete trial and its point."""
    objective = event["objective"]
    return describe_values({objective: event["metrics"].get(objective, math.nan)}, event["params"])


class NotebookDisplay(EventDisplay):
    """A block in the output of a notebook's cell, redrawn in place."""

    def __init__(self) -> None:
        from IPython.display import HTML, display

        self._html = HTML
        self._notes: list[str] = []
        self._best, self._line = "", "starting"
        self._share = 0.0
        self._handle = display(HTML(""), display_id=True)

    def note(self, text: str) -> None:
        self._notes.append(text)
        self._draw()

    def _show(self, event: dict[str, Any]) -> None:
        if event["is_best"]:
            self._best = f"best {describe_value(event)}"
        if event["budget_trials"]:
            self._share = event["ended"] / event["budget_trials"]
        if event["outcome"] not in ("complete", "cancelled"):
            self._notes.append(self.describe(event))
        self._line = self.describe(event)
        self._draw()

    def _draw(self) -> None:
        lines = [f"{draw_bar(self._share, BAR_WIDTH)} {self._line}", self._best, *self._notes[-SHOWN_NOTES:]]
        text = "\n".join(filter(None, lines))
        self._handle.update(self._html(f"<pre>{html.escape(text)}</pre>"))


class NoDisplay(EventDisplay):
    """Notes alone (`progress=never`)."""

    def _show(self, event: dict[str, Any]) -> None:
        pass


def make_display(setting: str) -> EventDisplay:
    """Return the display for a value of the key `progress`."""
    if setting == "never":
        return NoDisplay()
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    is_notebook = shell is not None and shell.__class__.__name__ == "ZMQInteractiveShell"
    return NotebookDisplay() if is_notebook else EventDisplay()
