"""Ends a program and all that it started, when told or when whoever started it is gone.

    python guard.py MARK      waits for the end of its standard input, and then ends what carries the mark

A process carries a mark if it stands in its environment, which children inherit, also those in a session of their own
whose parent has ended. Run as a file of its own by an interpreter without the packages: only the standard library.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

GRACE_S = 5.0  # between being asked to end and being ended


def end_marked(mark: str, reap: Callable[[], object] = lambda: None) -> None:
    """End all that carry the mark: asked first, then made to. `reap` is called for a child of this process."""
    for signum in (signal.SIGTERM, signal.SIGKILL):
        asked = set[int]()
        by = time.monotonic() + GRACE_S
        while time.monotonic() < by:
            reap()
            there = marked(mark)
            if not there:
                return
            for pid in there - asked:  # also what was started meanwhile
                with suppress(ProcessLookupError):
                    os.kill(pid, signum)
            asked |= there
            time.sleep(0.05)


def marked(mark: str) -> set[int]:
    """The processes that carry the mark; one that has ended and was not reaped has no environment any more."""
    found = set()
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit() and mark.encode() in (entry / "environ").read_bytes():
                found.add(int(entry.name))
    return found


if __name__ == "__main__":
    sys.stdin.read()
    end_marked(sys.argv[1])
