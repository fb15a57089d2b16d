"""Run the sweeps of one command: one after another, or in parallel on different hardware of a cluster.

Each sweep has its own process, so it does not inherit the previous sweep's priority, memory or signal handlers.
"""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO, Any, TextIO

from sweeper.cli.exits import INTERRUPTED, SOME_FAILED, signals_to_handle


@dataclass
class SweepQueue:
    name: str  # prefix of all output lines; a queue without a name writes directly to the terminal
    sweeps: Sequence[Sequence[str]]  # the arguments of each sweep
    codes: list[int] = field(default_factory=list)  # the exit codes of the ended sweeps
    process: subprocess.Popen[str] | None = None
    stopping: bool = False
    _starting: Any = field(default_factory=threading.RLock)  # a signal either prevents a start or reaches the sweep

    def run(self) -> None:
        """Run the sweeps until the last sweep has ended or `stop` is called."""
        for arguments in self.sweeps:
            with self._starting:
                if self.stopping:
                    return
                pipe = subprocess.PIPE if self.name else None
                command = [sys.executable, "-m", "sweeper", *arguments]
                # The process gets its own session, so that it receives Ctrl-C only once, through `stop`.
                self.process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
            if self.process.stdout and self.process.stderr:
                errors = threading.Thread(target=self._forward, args=(self.process.stderr, sys.stderr))
                errors.start()
                self._forward(self.process.stdout, sys.stdout)
                errors.join()
            code = self.process.wait()
            self.codes.append(code if code >= 0 else SOME_FAILED)

    def _forward(self, lines: IO[str], stream: TextIO) -> None:
        for line in lines:
            with suppress(BrokenPipeError):  # `| head` has closed the pipe; the sweep continues
                stream.write(f"{self.name}: {line}" if line.strip() else line)
                stream.flush()

    def stop(self, signum: int) -> None:
        """Prevent further sweeps from starting, and send the signal to the running sweep."""
        with self._starting:
            self.stopping = True
            if self.process is not None and self.process.poll() is None:
                os.kill(self.process.pid, signum)


def run_queues(queues: Sequence[SweepQueue]) -> int:
    """Run all queues in parallel. Return the highest exit code, or 130 after a signal."""
    threads = [threading.Thread(target=queue.run, daemon=True) for queue in queues]
    received = list[int]()

    def stop(signum: int, _: object) -> None:
        received.append(signum)
        for queue in queues:
            queue.stop(signum)

    previous = [(signum, signal.signal(signum, stop)) for signum in signals_to_handle()]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():  # wait briefly, so that signals are handled
                thread.join(0.2)
    finally:
        for signum, handler in previous:
            signal.signal(signum, handler)
    codes = [code for queue in queues for code in queue.codes]
    return INTERRUPTED if received else max(codes, default=SOME_FAILED)
