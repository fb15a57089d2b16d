"""The driver's end of the recording process: hand over a record and go on."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections import deque
from pathlib import Path
from typing import Any

from sweeper.common.errors import UserInputError
from sweeper.common.secrets import mask
from sweeper.common.trials import TrialRecord

RESTARTS = 3
MOST_STEPS_WAITING = 10_000  # of running trials, while the store is being opened
REPORT_PATIENCE_S = 2.0  # a report on thousands of trials takes longer; it is then written after the driver has gone
DATABASE_PORTS = {"postgresql": 5432, "mysql": 3306, "mssql": 1433}


class TrackingClient:
    """Records what is handed to it, in a process that the driver never waits for until `close`.

    `opening` is what `sweeper.tracking.process.Store` needs. Nothing handed over is lost: what is not written when the
    driver ends is in the study, and written by the next run.
    """

    def __init__(self, opening: dict[str, Any], folder: Path, directory: Path, lock_fd: int) -> None:
        self._opening, self._log, self._directory, self._lock_fd = (
            opening,
            folder / "recorder.log",
            directory,
            lock_fd,
        )
        self._unwritten: dict[int, TrialRecord] = {}
        self._unsent: deque[int] = deque()  # the numbers of those of them that this process has not been told
        self._steps: deque[dict[str, Any]] = deque(maxlen=MOST_STEPS_WAITING)
        self._close_sent = False
        self._restarts = 0
        self._mutex = threading.RLock()
        self.opened: dict[str, Any] | None = None
        self.trouble = ""  # why the last try did not succeed; empty when all is well
        self._closing: dict[str, Any] | None = None
        self._closed = threading.Event()
        self._start()

    def add(self, record: TrialRecord) -> None:
        """Record this trial, unless it is recorded."""
        with self._mutex:
            self._unwritten[record.number] = record
            self._unsent.append(record.number)
            self._send_waiting()

    def step(self, number: int, name: str, step: int, at_s: float, metrics: dict[str, float]) -> None:
        """Record a step of a trial that runs. Should the process die it may be lost: the trial's record is not."""
        with self._mutex:
            self._steps.append({"number": number, "name": name, "step": step, "at_s": at_s, "metrics": metrics})
            self._send_waiting()

    @property
    def behind(self) -> int:
        """How many records are handed over and not written."""
        return len(self._unwritten)

    def watch(self) -> None:
        """Start the process again if it has died; called from time to time."""
        if self._process.poll() is not None and not self._closed.is_set() and self._restarts < RESTARTS:
            self._restarts += 1
            self.trouble = f"the recording process ended with {self._process.returncode}; see {self._log}"
            self._start()

    def close(self, closing: dict[str, Any], patience_s: float) -> bool:
        """Write what is left and end the parent run. False if that took longer than `patience_s` without progress."""
        with self._mutex:
            self._closing = closing
            self._send_waiting()
        deadline, behind = time.monotonic() + patience_s, self.behind
        while not self._closed.wait(0.05) and time.monotonic() < deadline:
            self.watch()
            if self.behind < behind:
                deadline, behind = time.monotonic() + patience_s, self.behind
        self._hang_up()
        return self._closed.is_set()

    def abandon(self) -> None:
        """Leave the process to end by itself, when it has done what it is at: the report, once all is written."""
        self._hang_up()
        if self._closed.is_set():
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=REPORT_PATIENCE_S)

    def _hang_up(self) -> None:
        if self._process.stdin:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()

    # ── the process ──

    def _start(self) -> None:
        with self._mutex:
            self.opened, self._unsent, self._close_sent = None, deque(self._unwritten), False
            self._process = subprocess.Popen(
                [sys.executable, "-m", "sweeper.tracking.process", str(self._lock_fd)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log.open("a"),
                text=True,
                # It holds the sweep's lock as well: nobody may write to these runs before it has written all.
                pass_fds=[self._lock_fd],
                start_new_session=True,  # Ctrl-C is for the driver
                cwd=self._directory,  # where sqlite:///mlflow.db and its artifacts are
                env=_environment(),
            )
            self._send({"open": self._opening})
        threading.Thread(target=self._listen, args=[self._process], daemon=True).start()

    def _listen(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            answer = json.loads(line)
            with self._mutex:
                self.trouble = answer.get("trouble", "")
                if "opened" in answer:
                    self.opened = answer["opened"]
                    for number in answer["opened"]["written"]:
                        self._unwritten.pop(number, None)
                if "written" in answer:
                    self._unwritten.pop(answer["written"], None)
                if "closed" in answer:
                    self._closed.set()
                self._send_waiting()

    def _send_waiting(self) -> None:
        if self.opened is None:
            return
        while self._steps:
            self._send({"step": self._steps.popleft()})
        while self._unsent:
            if record := self._unwritten.get(self._unsent.popleft()):  # the store may have had it
                self._send({"record": record.to_json()})
        if self._closing is not None and not self._close_sent:
            self._close_sent = True
            self._send({"close": self._closing})

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except (BrokenPipeError, ValueError):
            pass  # it has died: watch() starts another, which is told everything again


def _environment() -> dict[str, str]:
    # The package may not be installed, only stand in the directory the driver was started from.
    path = [str(Path(__file__).resolve().parent.parent.parent), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))}


def check_uri(uri: str, word: str = "tracking.uri=") -> None:
    """Raises UserInputError where the tracking address, said after `word`, is none, or nothing answers there."""
    shown = f"{word}{mask(uri)}"
    try:
        parts = urllib.parse.urlsplit(uri)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise UserInputError(f"{shown}: is no address") from error
    kind = parts.scheme.split("+")[0]
    if kind == "sqlite":
        folder = Path(uri.partition(":///")[2]).parent
        if not os.access(folder, os.W_OK):
            raise UserInputError(f"{shown}: {folder} cannot be written")
        return
    if kind not in ("http", "https", *DATABASE_PORTS) or not host:
        raise UserInputError(f"{shown}: http://host:port, or a database such as sqlite:///mlflow.db")
    try:
        if kind in DATABASE_PORTS:
            socket.create_connection((host, port or DATABASE_PORTS[kind]), timeout=5).close()
        else:
            _ask_health(parts)
    except urllib.error.HTTPError as error:
        if error.code >= 500:
            raise UserInputError(f"{shown}: the server answers with {error.code}") from error
    except (OSError, http.client.HTTPException) as error:
        raise UserInputError(f"{shown}: nothing answers there ({getattr(error, 'reason', error)})") from error


def _ask_health(parts: urllib.parse.SplitResult) -> None:
    address = parts._replace(netloc=parts.netloc.rpartition("@")[2], path=parts.path.rstrip("/") + "/health")
    request = urllib.request.Request(address.geturl())
    if parts.username:
        said = f"{parts.username}:{parts.password or ''}".encode()
        request.add_header("Authorization", f"Basic {base64.b64encode(said).decode()}")
    urllib.request.urlopen(request, timeout=5).close()
