"""Show the events of a sweep in another process, as lines or as a live block in a notebook cell."""

import html
import sys
from typing import Any

SHOWN_NOTES = 6


class EventDisplay:
    """Prints notes and, unless `progress=never`, progress lines to standard error."""

    def __init__(self, *, has_progress: bool = True) -> None:
        self._keys = {"note": "text", **({"progress": "line"} if has_progress else {})}

    def event(self, event: dict[str, Any]) -> None:
        if key := self._keys.get(event["event"]):
            print(event[key], file=sys.stderr, flush=True)


class NotebookDisplay(EventDisplay):
    """A live view in a notebook cell, redrawn in place, with the latest notes and failures below."""

    def __init__(self) -> None:
        from IPython.display import HTML, display

        self._html = HTML
        self._notes = list[str]()
        self._block = ["starting"]
        self._handle = display(HTML(""), display_id=True)

    def event(self, event: dict[str, Any]) -> None:
        if event["event"] == "note":
            self._notes.append(event["text"])
        elif event["event"] == "progress":
            self._block = event["block"]
        elif event["event"] == "trial" and event["outcome"] not in ("complete", "cancelled"):
            self._notes.append(event["described"])
        text = "\n".join([*self._block, *self._notes[-SHOWN_NOTES:]])
        self._handle.update(self._html(f"<pre>{html.escape(text)}</pre>"))


def make_display(setting: str) -> EventDisplay:
    """Return the display for a value of the key `progress`."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    if setting != "never" and shell is not None and shell.__class__.__name__ == "ZMQInteractiveShell":
        return NotebookDisplay()
    return EventDisplay(has_progress=setting != "never")
