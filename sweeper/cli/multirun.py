"""Several sweeps of one command, each a process of its own: one after another, and on a cluster side by side with those
for other hardware. In one process a later sweep would inherit what an earlier one did to it: its priority, its memory,
Ray's handlers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO, Any, TextIO

INTERRUPTED, ENDED_BY_A_SIGNAL = 130, 1


@dataclass
class SweepQueue:
    """Sweeps that wait for one another. `name` stands before each line of theirs; one lane without a name has the
    terminal."""

    name: str
    sweeps: Sequence[Sequence[str]]  # what each is told
    codes: list[int] = field(default_factory=list)
    process: subprocess.Popen[str] | None = None
    stopping: bool = False
    _starting: Any = field(default_factory=threading.RLock)  # a signal comes before a sweep starts, or reaches it

    def run(self) -> None:
        """One after another."""
        for words in self.sweeps:
            with self._starting:
                if self.stopping:
                    return
                pipe = subprocess.PIPE if self.name else None
                # In a session of its own, so that a Ctrl-C reaches it once: from `stop`.
                self.process = subprocess.Popen(
                    [sys.executable, "-m", "sweeper", *words],
                    stdout=pipe,
                    stderr=pipe,
                    text=True,
                    start_new_session=True,
                )
            self._pass_all_on(self.process)
            code = self.process.wait()
            self.codes.append(code if code >= 0 else ENDED_BY_A_SIGNAL)

    def _pass_all_on(self, process: subprocess.Popen[str]) -> None:
        if process.stdout is None or process.stderr is None:
            return
        notes = threading.Thread(target=self._pass_on, args=(process.stderr, sys.stderr))
        notes.start()
        self._pass_on(process.stdout, sys.stdout)
        notes.join()

    def _pass_on(self, lines: IO[str], to: TextIO) -> None:
        for line in lines:
            with suppress(BrokenPipeError):  # `| head` has seen enough; the sweep goes on
                to.write(f"{self.name}: {line}" if line.strip() else line)
                to.flush()

    def stop(self, signum: int) -> None:
        """No further sweep; the one that runs is told, and stops as it does when it is alone."""
        with self._starting:
            self.stopping = True
            if self.process is not None and self.process.poll() is None:
                os.kill(self.process.pid, signum)


def run(lanes: Sequence[SweepQueue]) -> int:
    """All of them at once. The worst exit code; 130 after a signal."""
    threads = [threading.Thread(target=lane.run, daemon=True) for lane in lanes]
    stopped = list[int]()

    def stop(signum: int, _: object) -> None:
        stopped.append(signum)
        for lane in lanes:
            lane.stop(signum)

    before = [(signum, signal.signal(signum, stop)) for signum in (signal.SIGINT, signal.SIGTERM)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():  # in pieces, so that a signal is heeded
                thread.join(0.2)
    finally:
        for signum, handler in before:
            signal.signal(signum, handler)
    return INTERRUPTED if stopped else max((code for lane in lanes for code in lane.codes), default=ENDED_BY_A_SIGNAL)
