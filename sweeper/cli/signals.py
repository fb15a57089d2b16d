"""Handle SIGINT and SIGTERM: the first ends a sweep in order, the second at once."""

from __future__ import annotations

import os
import signal
import sys

from sweeper.common.exit_codes import INTERRUPTED

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequests:
    """Counts the requests to stop. `command` resumes the sweep, and is shown when it leaves at once."""

    def __init__(self, command: str) -> None:
        self._command = command
        self._count = 0
        self._previous = [signal.getsignal(signum) for signum in SIGNALS]
        self.leave_at_once = False  # set where there are no running trials to wait for

    @property
    def requested(self) -> bool:
        return self._count > 0

    def install(self) -> None:
        """Handle the signals from now on. Called again after Ray has installed its own handlers."""
        for signum in SIGNALS:
            signal.signal(signum, self._handle)

    def restore(self) -> None:
        """Give the signals back: another sweep may follow in this process."""
        for signum, handler in zip(SIGNALS, self._previous, strict=True):
            signal.signal(signum, handler)

    def add(self) -> None:
        """Count a request that came by another way: Ray answers SIGTERM with SystemExit while it starts."""
        self._count += 1

    def _handle(self, *_: object) -> None:
        self._count += 1
        if self._count > 1 or self.leave_at_once:
            self.leave("left at once", INTERRUPTED)

    def leave(self, reason: str, code: int) -> None:
        """End the process from any thread. The next start of the sweep repairs what was left open."""
        show_cursor = "\x1b[?25h" if sys.stderr.isatty() else ""  # the live block hides it
        os.write(2, f"{show_cursor}\n{reason}; to resume:\n  {self._command}\n".encode())
        os._exit(code)
