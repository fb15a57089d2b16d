"""A program and all that it starts, read as it prints, and ended with all its children."""

from __future__ import annotations

import os
import re
import selectors
import signal
import subprocess
import sys
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from workloads.api.contract import OutOfMemory, TrialTimeout
from workloads.api.logs import LONGEST_LINE
from workloads.command import guard
from workloads.command.guard import end_marked

LAST_LINES = 100  # torchrun alone says forty after what its processes said
LOOKS_EVERY_S = 1.0  # whether a program has ended, or was to end
MOST_LOG_BYTES = 2**20  # of its log is kept

# What programs print when they have failed, though they may not end for long.
OUT_OF_MEMORY = re.compile(r"OutOfMemoryError|CUDA out of memory|HIP out of memory|CUDA error: out of memory")
# The line of a traceback that says what it was, or what an interpreter says that finds no program.
TELLING = re.compile(r"\b\w*(?:Error|Exception): \S|\[Errno \d+\]")
FAILED = re.compile(
    r"Watchdog caught collective operation timeout|NCCL (?:error|WARN.*unhandled)|unhandled (?:cuda|system) error"
)


class ProgramFailed(Exception):
    """It ended badly, or had to be ended."""


class Program:
    """Runs `arguments` (a text: by a shell) in `directory` until it ends, or until `enough` says so of a line that it
    printed, or `over` whenever it is asked. Afterwards the folder `output` is gone.

    Raises OutOfMemory, ProgramFailed and TookTooLong (with the last lines), FileNotFoundError.
    """

    def __init__(
        self,
        arguments: Sequence[str] | str,
        environment: Mapping[str, str],
        directory: Path,
        output: Path,
        *,
        silence_s: float,
        timeout_s: float,
        enough: Callable[[str], bool],
        over: Callable[[], bool],
    ) -> None:
        self.last: deque[str] = deque(maxlen=LAST_LINES)
        self.log = bytearray()
        self._silence_s, self._enough, self._over, self._rest = silence_s, enough, over, b""
        self._until_s, self._timeout_s = time.monotonic() + timeout_s, timeout_s
        self._mark = f"SWEEPER_PROGRAM={uuid.uuid4().hex}"
        name, _, value = self._mark.partition("=")
        self._process = subprocess.Popen(
            arguments,
            shell=isinstance(arguments, str),
            env={**os.environ, **environment, name: value},
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        # Should this process be killed, the program would go on and keep its GPUs.
        self._guard = subprocess.Popen(
            [sys.executable, "-S", guard.__file__, self._mark, str(self._process.pid), str(output)],
            stdin=subprocess.PIPE,
        )
        self._guard.wait()  # what goes on is a child of it

    def run(self) -> None:
        """Read until the end."""
        try:
            if self._read():
                return
            code = self._process.wait()
        finally:
            self.end()
        if code and not self._over():
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            raise self._failed(f"the program ended with {how}: {self._last_word()}")

    def _read(self) -> bool:
        """Whether there was enough, or another rank had enough."""
        assert self._process.stdout is not None
        silent_since, looked_s, ended = time.monotonic(), 0.0, False
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while True:
                if time.monotonic() > self._until_s:
                    raise self._with_last_lines(TrialTimeout(f"took longer than trial.timeout_s={self._timeout_s:g}"))
                there_is_more = selector.select(LOOKS_EVERY_S)
                if time.monotonic() - looked_s >= LOOKS_EVERY_S:
                    looked_s = time.monotonic()
                    if self._over():
                        return True
                    if ended:  # a child of it has its output and goes on, printing or not
                        break
                    ended = self._process.poll() is not None
                if not there_is_more:
                    if time.monotonic() - silent_since > self._silence_s:
                        raise self._failed(f"printed nothing for {self._silence_s:g} s, and was ended")
                    continue
                silent_since = time.monotonic()
                chunk = os.read(self._process.stdout.fileno(), 65536)
                if not chunk:
                    break
                self.log += chunk
                del self.log[:-MOST_LOG_BYTES]
                first, *more = re.split(rb"[\r\n]", chunk)
                *lines, self._rest = [self._rest + first, *more]
                self._rest = self._rest[:LONGEST_LINE]
                if any(self._take_line(line) for line in lines):
                    return True
        return self._take_line(self._rest) if self._rest else False

    def _take_line(self, line: bytes) -> bool:
        text = line.decode(errors="replace")
        if text.strip():
            self.last.append(text[:1000])
        if OUT_OF_MEMORY.search(text):
            raise OutOfMemory(text.strip()[:300])
        if FAILED.search(text) and not self._over():
            raise self._failed(text.strip()[:300])
        return self._enough(text)

    def _last_word(self) -> str:
        telling = [line for line in self.last if TELLING.search(line)]
        worded = [line for line in self.last if re.search(r"\w", line)]  # and no rule below a table
        return (telling or worded or ["it printed nothing"])[-1].strip()

    def _failed(self, why: str) -> Exception:
        return self._with_last_lines(ProgramFailed(why))

    def _with_last_lines(self, error: Exception) -> Exception:
        error.add_note("\n".join(self.last))
        return error

    def end(self) -> None:
        """End it and all that it started."""
        end_marked(self._mark, self._process.pid, reap=self._process.poll)
        assert self._guard.stdin is not None
        self._guard.stdin.close()
