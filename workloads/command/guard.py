"""Ends a program and all that it started, when told or when whoever started it is gone.

    python guard.py MARK SESSION FOLDER      waits for the end of its standard input, then ends what is marked, and
                                             removes the folder that it worked in

A process is marked if the mark stands in its environment, which children inherit, also those in a session of their own
whose parent has ended; or if it is of the program's session, whatever has become of its environment. Run as a file of
its own by an interpreter without the packages: only the standard library.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

GRACE_S = 5.0  # between being asked to end and being ended


def end_marked(mark: str, session: int, reap: Callable[[], object] = lambda: None) -> None:
    """End all that is marked: asked first, then made to. `reap` is called for a child of this process."""
    for signum in (signal.SIGTERM, signal.SIGKILL):
        asked = set[int]()
        by = time.monotonic() + GRACE_S
        while time.monotonic() < by:
            reap()
            there = marked(mark, session)
            if not there:
                return
            for pid in there - asked:  # also what was started meanwhile
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signum)
            asked |= there
            time.sleep(0.05)


def marked(mark: str, session: int) -> set[int]:
    """The processes that are marked; one that has ended and was not reaped is none."""
    found = set()
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit():
                state, _, _, of_session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
                mine = int(of_session) == session or mark.encode() in (entry / "environ").read_bytes()
                found |= {int(entry.name)} if mine and state != "Z" else set()
    return found


if __name__ == "__main__":
    if os.fork():  # whoever ends a worker ends its children, and this has to outlive it
        os._exit(0)
    os.setsid()
    sys.stdin.read()
    end_marked(sys.argv[1], int(sys.argv[2]))
    shutil.rmtree(sys.argv[3], ignore_errors=True)
