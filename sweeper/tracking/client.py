"""The driver's side of the recording process: hands over records without waiting for MLflow."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sweeper.common.trials import TrialRecord
from sweeper.tracking.mlflow_view import SweepView

MAX_RESTARTS = 3
REFUSAL_PATIENCE_S = 20.0  # of a server that refuses this user
START_PATIENCE_S = 60.0  # on a busy machine the process took 20 s to import MLflow and open its store
MAX_WAITING_STEPS = 10_000  # of running trials, while the store is being opened


class TrackingClient:
    """Sends trials and their steps to the recording process. The driver waits for it in `close` only.

    Nothing is lost: what is not written when the driver ends is in the study, and the sweep's next run writes it.

    Attributes:
        experiment_id: MLflow's id of the experiment; None until the process has opened the store.
        view_key: the key of the sweep's view in MLflow's pages, once its results are there; empty where there is none.
        last_error: why the process's last attempt failed; empty after one that succeeded.
    """

    def __init__(self, store_arguments: dict[str, Any], folder: Path, directory: Path, lock_fd: int) -> None:
        """Start the process.

        Args:
            store_arguments: the arguments of `sweeper.tracking.store.Store`.
            folder: the sweep's folder, for the process's log.
            directory: the results directory, which has MLflow's artifacts.
            lock_fd: a file descriptor that holds the sweep's lock.
        """
        self._store_arguments = store_arguments
        self._log = folder / "tracking.log"
        self._directory = directory
        self._lock_fd = lock_fd
        self._unwritten: dict[int, TrialRecord] = {}
        self._unsent: deque[int] = deque()  # the numbers of those that this process has not been sent
        self._steps: deque[dict[str, Any]] = deque(maxlen=MAX_WAITING_STEPS)
        self._closing_message: dict[str, Any] | None = None
        self._front: list[int] | None = None  # the trials on it; None without one
        self._sent_front: list[int] | None = None  # to this process
        self._close_sent = False
        self._closed = threading.Event()
        self._restarts = 0
        self._progress_count = 0  # of the process's answers that are no errors
        self._stored_digest = ""  # of the results that the store has
        self._mutex = threading.RLock()
        self.experiment_id: str | None = None
        self.view_key = ""
        self.last_error = ""
        self._is_refused = False  # by the last error
        self._start()

    @property
    def is_open(self) -> bool:
        """Return whether the process has opened the store."""
        return self.experiment_id is not None

    @property
    def pending(self) -> int:
        """The number of records that are handed over and not written."""
        return len(self._unwritten)

    def log_trial(self, record: TrialRecord) -> None:
        """Record a trial, unless it is written already."""
        with self._mutex:
            self._unwritten[record.number] = record
            self._unsent.append(record.number)
            self._send_waiting()

    def log_step(self, number: int, name: str, step: int, at_s: float, metrics: dict[str, float]) -> None:
        """Record a step of a running trial. It may be lost if the process dies; the trial's record is not."""
        with self._mutex:
            self._steps.append({"number": number, "name": name, "step": step, "at_s": at_s, "metrics": metrics})
            self._send_waiting()

    def log_front(self, numbers: Sequence[int]) -> None:
        """Mark these trials as the front of several objectives, and no others."""
        with self._mutex:
            self._front = list(numbers)
            self._send_waiting()

    def restart_if_dead(self) -> None:
        """Start the process again if it has died, at most `MAX_RESTARTS` times."""
        code = self._process.poll()
        if code is not None and not self._closed.is_set() and self._restarts < MAX_RESTARTS:
            self._restarts += 1
            self.last_error = f"the recording process ended with exit code {code}; see {self._log}"
            self._start()

    def has_results(self, digest: str) -> bool:
        """Return whether the store has all records and the results with this digest, once it is open.

        Without an answer they are written again, which takes longer and changes nothing.
        """
        deadline_s = time.monotonic() + START_PATIENCE_S
        while not (self.is_open or self.last_error) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        with self._mutex:
            return self.is_open and not self._unwritten and self._stored_digest == digest

    def close(self, results: dict[str, Any], view: SweepView, patience_s: float) -> bool:
        """Write what is pending, end the parent run with `results`, the arguments of `Store.close`, and write the view.

        Returns:
            Whether everything is written. It gives up after `patience_s` seconds without progress, at most
            REFUSAL_PATIENCE_S where the server refuses. A process that is still starting has START_PATIENCE_S.
        """
        with self._mutex:
            self._closing_message = {"close": results, "view": asdict(view)}
            self._send_waiting()
        started_s = progress_s = time.monotonic()
        progress = self._progress_count
        while not self._closed.wait(0.05):
            now_s = time.monotonic()
            if now_s > progress_s + (min(patience_s, REFUSAL_PATIENCE_S) if self._is_refused else patience_s):
                break
            self.restart_if_dead()
            is_starting = not (self.is_open or self.last_error) and now_s < started_s + START_PATIENCE_S
            if is_starting or self._progress_count > progress:
                progress_s, progress = now_s, self._progress_count
        self._close_input()
        return self._closed.is_set()

    def wait_for_report(self, patience_s: float) -> None:
        """Wait so long for the process to write the report and end, if it has closed the store."""
        self._close_input()
        if self._closed.is_set():
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=patience_s)

    def detach(self) -> None:
        """Let the process end by itself, after the message that it handles or after the report."""
        self._close_input()

    def _close_input(self) -> None:
        if self._process.stdin:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()

    # ── the process ──

    def _start(self) -> None:
        with self._mutex:
            self.experiment_id = None
            self._unsent = deque(self._unwritten)
            self._close_sent = False
            self._sent_front = None
            self._process = subprocess.Popen(
                [sys.executable, "-m", "sweeper.tracking.process", str(self._lock_fd)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log.open("a"),
                text=True,
                # It holds the sweep's lock too: nobody else may write to these runs before it has written everything.
                pass_fds=[self._lock_fd],
                start_new_session=True,  # Ctrl-C is for the driver
                cwd=self._directory,  # MLflow keeps artifacts of a SQLite store in ./mlruns
                env=_environment(),
            )
            self._send({"open": self._store_arguments})
        threading.Thread(target=self._read_answers, args=[self._process], daemon=True).start()

    def _read_answers(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            answer = json.loads(line)
            with self._mutex:
                self.last_error = answer.get("error", "")
                self._is_refused = answer.get("is_refused", False)
                self._progress_count += "error" not in answer
                if "opened" in answer:
                    self.experiment_id = answer["opened"]["experiment_id"]
                    for number in answer["opened"]["written"]:
                        self._unwritten.pop(number, None)
                    before = answer["opened"]["written_before"]
                    self._unwritten = {n: record for n, record in self._unwritten.items() if n >= before}
                    self._stored_digest = answer["opened"]["results"].get("digest", "")
                    self.view_key = answer["opened"]["results"].get("view", "")
                if "written" in answer:
                    self._unwritten.pop(answer["written"], None)
                if "closed" in answer:
                    self.view_key = answer["closed"]["view"]
                    self._closed.set()
                self._send_waiting()

    def _send_waiting(self) -> None:
        if not self.is_open:
            return
        while self._steps:
            self._send({"step": self._steps.popleft()})
        while self._unsent:
            if record := self._unwritten.get(self._unsent.popleft()):  # the store may have had it
                self._send({"record": record.to_json()})
        if self._front is not None and self._front != self._sent_front:
            self._sent_front = self._front
            self._send({"front": self._front})
        if self._closing_message is not None and not self._close_sent:
            self._close_sent = True
            self._send(self._closing_message)

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except (BrokenPipeError, ValueError):
            pass  # it has died: restart_if_dead() starts another one, which is sent everything again


def _environment() -> dict[str, str]:
    # The package may not be installed but found in the directory from which the driver was started.
    path = [str(Path(__file__).resolve().parent.parent.parent), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))}
