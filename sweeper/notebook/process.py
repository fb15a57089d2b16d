"""A sweep in a process of its own: Ray, signals and priorities do not touch the process that asks for it.

A notebook keeps its own Ray connection, a second Ctrl-C does not end its kernel, and its process is not made nicer.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import sweeper

PATIENCE_S = 2.0  # for output of processes that the sweep leaves, such as the one that writes its report


@dataclass
class Outcome:
    """How the process ended.

    Attributes:
        code: its exit code.
        end: the event `end` of `progress=json`; None if the sweep did not get there.
        errors: what else it wrote to standard error.
        output: what it wrote to standard output.
        is_interrupted: a Ctrl-C was passed on to it.
    """

    code: int = 0
    end: dict[str, Any] | None = None
    errors: list[str] = field(default_factory=list)
    output: list[str] = field(default_factory=list)
    is_interrupted: bool = False


def run_process(words: Sequence[str], on_event: Callable[[dict[str, Any]], None]) -> Outcome:
    """Run `python -m` with these words until it ends. The events are handed over in this thread's order.

    A KeyboardInterrupt is passed on as a SIGINT, so that the sweep ends in order; a second one ends it at once. So is
    a SIGTERM of this process.
    """
    outcome = Outcome()
    process = subprocess.Popen(
        [sys.executable, "-m", *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=_environment(),
        start_new_session=True,  # a notebook's interrupt goes to all processes of the kernel's group
    )
    assert process.stdout is not None and process.stderr is not None
    readers = [
        threading.Thread(target=_read_events, args=(process.stderr, outcome, on_event), daemon=True),
        threading.Thread(target=_read_lines, args=(process.stdout, outcome.output), daemon=True),
    ]
    for reader in readers:
        reader.start()
    restore = _forward_sigterm(process)
    try:
        _wait(process, outcome)
    finally:
        restore()
    for reader in readers:
        reader.join(PATIENCE_S)
    outcome.code = process.returncode
    return outcome


def _wait(process: subprocess.Popen[str], outcome: Outcome) -> None:
    while True:
        try:
            process.wait()
            return
        except KeyboardInterrupt:
            outcome.is_interrupted = True
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGINT)


def _forward_sigterm(process: subprocess.Popen[str]) -> Callable[[], None]:
    """Pass SIGTERM on, as a batch system sends it. Returns what ends that; in another thread nothing is passed on."""
    if threading.current_thread() is not threading.main_thread():
        return lambda: None

    def forward(signum: int, _: object) -> None:
        process.send_signal(signum)

    previous = signal.signal(signal.SIGTERM, forward)

    def restore() -> None:
        signal.signal(signal.SIGTERM, previous)

    return restore


def _read_events(stream: IO[str], outcome: Outcome, on_event: Callable[[dict[str, Any]], None]) -> None:
    for line in stream:
        try:
            event = json.loads(line)
        except ValueError:
            event = None
        if not isinstance(event, dict) or "event" not in event:
            outcome.errors.append(line.rstrip("\n"))
            continue
        if event["event"] == "end":
            outcome.end = event
        on_event(event)


def _read_lines(stream: IO[str], lines: list[str]) -> None:
    lines.extend(stream)


def _environment() -> dict[str, str]:
    """Return the environment of the process, in which it finds this package wherever it was imported from.

    A notebook's kernel asks programs for colours, which have no place in a result's summary.
    """
    root = str(Path(sweeper.__file__).resolve().parent.parent)
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    kept = {name: value for name, value in os.environ.items() if name not in ("FORCE_COLOR", "CLICOLOR_FORCE")}
    return {**kept, "PYTHONPATH": os.pathsep.join(paths)}
