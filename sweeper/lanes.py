"""Sweeps of one command for different hardware of a cluster: side by side, those for the same one after another."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import IO, TextIO

INTERRUPTED = 130


@dataclass
class Lane:
    """The sweeps for one kind of hardware, each a process of its own."""

    name: str
    sweeps: list[Sequence[str]]  # what each is told
    codes: list[int] = field(default_factory=list)
    process: subprocess.Popen[str] | None = None
    stopping: bool = False

    def run(self) -> None:
        """One after another, each line of theirs after the lane's name."""
        for words in self.sweeps:
            if self.stopping:
                return
            command = [sys.executable, "-m", "sweeper", *words]
            pipe = subprocess.PIPE
            # In a session of its own, so that a Ctrl-C reaches it once: from `stop`.
            self.process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
            assert self.process.stdout is not None and self.process.stderr is not None
            notes = threading.Thread(target=self._pass_on, args=(self.process.stderr, sys.stderr))
            notes.start()
            self._pass_on(self.process.stdout, sys.stdout)
            notes.join()
            self.codes.append(self.process.wait())

    def _pass_on(self, lines: IO[str], to: TextIO) -> None:
        for line in lines:
            to.write(f"{self.name}: {line}" if line.strip() else line)
            to.flush()

    def stop(self, signum: int) -> None:
        """No further sweep; the one that runs is told, and stops as it does when it is alone."""
        self.stopping = True
        if self.process is not None and self.process.poll() is None:
            os.kill(self.process.pid, signum)


def run(lanes: Sequence[Lane]) -> int:
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
    return INTERRUPTED if stopped else max(code for lane in lanes for code in lane.codes)
