"""Run a program, read its output line by line, and terminate it and everything that it started."""

import os
import re
import selectors
import signal
import subprocess
import sys
import time
import uuid
from collections import deque
from collections.abc import Callable
from pathlib import Path

from workloads.api import processes
from workloads.api.contract import OutOfMemory, ProgramFailed, TrialTimeout
from workloads.command.invocation import Invocation
from workloads.formats.logs import LONGEST_LINE

LAST_LINES = 100  # torchrun prints forty lines after the lines of its processes
POLL_INTERVAL_S = 1.0  # between checks whether the program has ended or must stop
MAX_LOG_BYTES = 2**20  # only the end of a longer log is stored

# Lines that programs print after a failure, even if they then keep running for a long time.
OUT_OF_MEMORY = re.compile(r"OutOfMemoryError|(?:CUDA|HIP)(?: error:)? out of memory")
COLLECTIVE_FAILED = re.compile(
    r"Watchdog caught collective operation timeout|NCCL (?:error|WARN.*unhandled)|unhandled (?:cuda|system) error"
)
# A traceback line that names the error, an interpreter's message that it cannot open the program, or the last message
# of ROCm's runtime before it aborts at an invalid address.
ERROR_LINE = re.compile(r"\b\w*(?:Error|Exception): \S|\[Errno \d+\]|Memory access fault by GPU")


class Program:
    """A running program and everything that it starts.

    The program runs until it ends, until `stop_on_line` returns True for an output line, or until `should_stop`, called
    every POLL_INTERVAL_S, returns True. A program fails if it prints nothing for `silence_s`, and it is terminated
    after `timeout_s`. The folder `output` is removed after the program ends.
    """

    def __init__(
        self,
        invocation: Invocation,
        output: Path,
        silence_s: float,
        timeout_s: float,
        *,
        stop_on_line: Callable[[str], bool],
        should_stop: Callable[[], bool],
    ) -> None:
        """Start the program. Raises FileNotFoundError if the program or its directory does not exist."""
        self.last_lines: deque[str] = deque(maxlen=LAST_LINES)  # the output's last non-empty lines
        self.log = bytearray()  # the output's end, at most MAX_LOG_BYTES
        self._silence_s, self._timeout_s = silence_s, timeout_s
        self._stop_on_line, self._should_stop = stop_on_line, should_stop
        self._started_s = time.monotonic()
        self._mark = f"SWEEPER_PROGRAM={uuid.uuid4().hex}"
        name, _, value = self._mark.partition("=")
        self._process = subprocess.Popen(
            invocation.arguments,
            shell=isinstance(invocation.arguments, str),
            env={**os.environ, **invocation.environment, name: value},
            cwd=invocation.directory,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        # Without the guard, the program would continue to run and keep its GPUs if this process were killed.
        self._guard = subprocess.Popen(
            [sys.executable, "-P", "-S", processes.__file__, self._mark, str(self._process.pid), str(output)],
            stdin=subprocess.PIPE,
        )
        self._guard.wait()  # the guard forks and exits, and its child guards the program

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._started_s

    def run(self) -> None:
        """Read the output to its end, then terminate whatever is left of the program.

        Raises:
            OutOfMemory: the program printed an out-of-memory error.
            ProgramFailed: the program failed, a collective failed, or the program printed nothing for too long.
            TrialTimeout: the program took longer than `timeout_s`.
        """
        try:
            if self._read():
                return
            code = self._process.wait()
        finally:
            processes.terminate(self._find_running)
            assert self._guard.stdin is not None
            self._guard.stdin.close()
        if code and not self._should_stop():
            ending = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            # The last line that names an error, or the last line that contains a word (not a table's rule).
            error_lines = [line for line in self.last_lines if ERROR_LINE.search(line)]
            word_lines = [line for line in self.last_lines if re.search(r"\w", line)]
            reason = (error_lines or word_lines or ["it printed nothing"])[-1].strip()
            raise ProgramFailed(f"the program ended with {ending}: {reason}")

    def _find_running(self) -> set[int]:
        self._process.poll()  # reaps the process
        return processes.find_marked(self._mark, self._process.pid)

    def _read(self) -> bool:
        assert self._process.stdout is not None
        last_output_s, last_poll_s, has_ended, unfinished_line = time.monotonic(), 0.0, False, b""
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while True:
                if self.elapsed_s > self._timeout_s:
                    raise TrialTimeout(f"took longer than trial.timeout_s={self._timeout_s:g}")
                is_readable = selector.select(POLL_INTERVAL_S)
                if time.monotonic() - last_poll_s >= POLL_INTERVAL_S:
                    last_poll_s = time.monotonic()
                    if self._should_stop():
                        return True
                    if has_ended:  # a child that still runs has inherited the output, and may or may not print
                        break
                    has_ended = self._process.poll() is not None
                if not is_readable:
                    if time.monotonic() - last_output_s > self._silence_s:
                        raise ProgramFailed(f"printed nothing for {self._silence_s:g} s, and was terminated")
                    continue
                last_output_s = time.monotonic()
                chunk = os.read(self._process.stdout.fileno(), 65536)
                if not chunk:
                    break
                self.log += chunk
                del self.log[:-MAX_LOG_BYTES]
                *lines, unfinished_line = re.split(rb"[\r\n]", unfinished_line + chunk)
                unfinished_line = unfinished_line[:LONGEST_LINE]
                if any(self._take_line(line) for line in lines):
                    return True
        return bool(unfinished_line) and self._take_line(unfinished_line)

    def _take_line(self, line: bytes) -> bool:
        text = line.decode(errors="replace")
        if text.strip():
            self.last_lines.append(text[:1000])
        if OUT_OF_MEMORY.search(text):
            raise OutOfMemory(text.strip()[:300])
        if COLLECTIVE_FAILED.search(text) and not self._should_stop():
            raise ProgramFailed(text.strip()[:300])
        return self._stop_on_line(text)
