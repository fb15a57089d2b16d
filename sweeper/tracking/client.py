"""The driver's interface to the recording process. The driver hands over records without waiting for MLflow."""

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from omegaconf import OmegaConf

from sweeper.common.format import exact_value
from sweeper.common.trials import TrialRecord
from sweeper.preflight.sweep_plan import SweepPlan
from sweeper.tracking import mlflow_store
from sweeper.tracking.mlflow_view import SweepView
from sweeper.tracking.provenance import driver_versions
from workloads.api.secrets import masked

PROCESS = "sweeper.tracking.process"
MAX_RESTARTS = 3
REFUSAL_PATIENCE_S = 20.0  # how long to wait if the server rejects this user
START_PATIENCE_S = 60.0  # on a busy machine, the process took 20 s to import MLflow and open the store
MAX_WAITING_STEPS = 10_000  # running trials' steps to keep while the store is opening


class TrackingClient:
    """Sends trials and their steps to the recording process. The driver waits for that process only in `close`.

    No record is lost. The study keeps records that are unwritten when the driver ends, and the next run writes them.
    """

    def __init__(self, store_arguments: dict[str, Any], folder: Path, directory: Path, lock_fd: int) -> None:
        """Start the process with the arguments of `sweeper.tracking.store.Store`. `lock_fd` holds the sweep's lock."""
        self._store_arguments = store_arguments
        self._log = folder / "tracking.log"
        self._directory = directory  # where MLflow puts artifacts
        self._lock_fd = lock_fd
        self._unwritten: dict[int, TrialRecord] = {}
        self._unsent: deque[int] = deque()  # numbers of records not yet sent to this process
        self._steps: deque[dict[str, Any]] = deque(maxlen=MAX_WAITING_STEPS)
        self._latest: dict[str, dict[str, Any]] = {}  # front and results, of which only the last message counts
        self._sent: dict[str, dict[str, Any]] = {}  # the latest messages sent to this process
        self._closed = threading.Event()
        self._restarts = 0
        self._progress_count = 0  # the number of responses that are not errors
        self._stored_digest = ""  # the digest of the results in the store
        self._mutex = threading.RLock()
        self.experiment_id: str | None = None  # None until the process has opened the store
        self.view_key = ""  # the key of the sweep's MLflow view, once the results are written
        self.last_error = ""  # the error of the process's last attempt
        self.refused: dict[int, str] = {}  # why the store permanently rejects trials, by number
        self._is_refused = False  # whether the last error was that the server rejects this user
        self._start()

    @property
    def is_open(self) -> bool:
        return self.experiment_id is not None

    @property
    def pending(self) -> int:
        """The number of records that have been handed over but not yet written."""
        return len(self._unwritten)

    def log_trial(self, record: TrialRecord) -> None:
        """Record a trial unless it is already written."""
        with self._mutex:
            self._unwritten[record.number] = record
            self._unsent.append(record.number)
            self._send_waiting()

    def log_step(self, number: int, name: str, step: int, at_s: float, metrics: dict[str, float]) -> None:
        """Record a step of a running trial. If the process dies, the step may be lost but the record is not."""
        with self._mutex:
            self._steps.append({"number": number, "name": name, "step": step, "at_s": at_s, "metrics": metrics})
            self._send_waiting()

    def log_front(self, numbers: Sequence[int]) -> None:
        """Mark these trials, and no others, as the front of several objectives."""
        with self._mutex:
            self._latest["front"] = {"front": list(numbers)}
            self._send_waiting()

    def restart_if_dead(self) -> None:
        """Restart the process if it has died, up to `MAX_RESTARTS` times in total."""
        code = self._process.poll()
        if code is not None and not self._closed.is_set() and self._restarts < MAX_RESTARTS:
            self._restarts += 1
            self.last_error = f"the recording process ended with exit code {code}; see {self._log}"
            self._start()

    def has_results(self, digest: str) -> bool:
        """Return whether the store responds and contains all records and these results."""
        deadline_s = time.monotonic() + START_PATIENCE_S
        while not (self.is_open or self.last_error) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        with self._mutex:
            return self.is_open and not self._unwritten and self._stored_digest == digest

    def close(
        self, results: dict[str, Any], view: SweepView, patience_s: float, has_left: Callable[[], bool] = lambda: False
    ) -> bool:
        """Write pending data, end the parent run with `results` (arguments of `Store.close`), and write the view.

        Returns whether everything is written. Gives up when `has_left` returns true, or after `patience_s` seconds
        without progress (at most REFUSAL_PATIENCE_S if the server rejects this user). For a process that is still
        starting, the limit is START_PATIENCE_S.
        """
        with self._mutex:
            self._latest["close"] = {"close": results, "view": asdict(view)}
            self._send_waiting()
        started_s = progress_s = time.monotonic()
        progress = self._progress_count
        while not self._closed.wait(0.05):
            now_s = time.monotonic()
            limit_s = min(patience_s, REFUSAL_PATIENCE_S) if self._is_refused else patience_s
            if has_left() or now_s > progress_s + limit_s:
                break
            self.restart_if_dead()
            is_starting = not (self.is_open or self.last_error) and now_s < started_s + START_PATIENCE_S
            if is_starting or self._progress_count > progress:
                progress_s, progress = now_s, self._progress_count
        self.detach()
        if self._closed.is_set() and self.pending:
            self.last_error = "it refuses their runs"
        return self._closed.is_set() and not self.pending

    def wait_for_report(self, patience_s: float) -> None:
        """If the process has closed the store, wait up to `patience_s` for the report and the end of the process."""
        self.detach()
        if self._closed.is_set():
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=patience_s)

    def detach(self) -> None:
        """Let the process exit on its own after the current message or the report."""
        if self._process.stdin:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()

    def _start(self) -> None:
        # The driver may have found this package in the working directory and not in an installation. The recording
        # process must not import modules from the results directory, such as a `queue.py` or `mlflow/`.
        entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        path = [str(Path(__file__).resolve().parent.parent.parent), *map(os.path.abspath, filter(None, entries))]
        answers_fd, answering_fd = os.pipe()  # printed output (even from a sitecustomize) goes to the log
        log = self._log.open("a")
        with self._mutex:
            self.experiment_id = None
            self._unsent = deque(self._unwritten)
            self._sent = {}
            self._process = subprocess.Popen(
                [*[sys.executable, "-P", "-W", "ignore", "-m", PROCESS], str(answering_fd), str(self._lock_fd)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                text=True,
                # The recording process also holds the sweep's lock, so no other process writes to these runs before
                # everything is written.
                pass_fds=[answering_fd, self._lock_fd],
                start_new_session=True,  # Ctrl-C must reach only the driver
                cwd=self._directory,  # for a SQLite store, MLflow keeps artifacts in ./mlruns
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
            )
            os.close(answering_fd)
            log.close()
            self._send({"open": self._store_arguments})
        threading.Thread(target=self._read_answers, args=[os.fdopen(answers_fd)], daemon=True).start()

    def _read_answers(self, answers: TextIO) -> None:
        with answers:
            for line in answers:
                self._take(json.loads(line))

    def _take(self, answer: dict[str, Any]) -> None:
        with self._mutex:
            self.last_error = answer.get("error", "")
            self._is_refused = answer.get("is_refused", False)
            self._progress_count += "error" not in answer
            if opened := answer.get("opened"):
                self.experiment_id = opened["experiment_id"]
                for number in (*range(opened["written_before"]), *opened["written"]):
                    self._unwritten.pop(number, None)
                self._stored_digest = opened["results"].get("digest", "")
                self.view_key = opened["results"].get("view", "")
            if "refused" in answer:
                self.refused[answer["written"] if "written" in answer else answer["left_out"]] = answer["refused"]
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
            if record := self._unwritten.get(self._unsent.popleft()):  # None if the store already has the record
                self._send({"record": record.to_json()})
        for kind, message in self._latest.items():
            if self._sent.get(kind) != message:
                self._sent[kind] = message
                self._send(message)

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        # If the process has died, a new process will get everything again.
        with contextlib.suppress(BrokenPipeError, ValueError):
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()


def opening_message(
    plan: SweepPlan, *, study: str, trials: int, command: str, provenance: dict[str, Any], texts: Mapping[str, str]
) -> dict[str, Any]:
    """Return the arguments of `sweeper.tracking.store.Store`, with the parent run's parameters, tags and artifacts.

    `trials` is the number of trials in the study. Secrets in `command` must be masked. Non-empty `texts` become tags.
    """
    config = plan.config
    resolved = OmegaConf.to_yaml(OmegaConf.create(masked(asdict(config))))
    objectives = json.dumps({objective.metric: objective.direction for objective in plan.criteria.objectives})
    versions = {f"version.{name}": version for name, version in provenance["versions"].items() if version}
    return {
        "uri": config.tracking.uri or mlflow_store.default_uri(plan.directory),
        "experiment": config.tracking.experiment,
        "study_id": study,
        "sweep": plan.name,
        "parent": {
            "trials": trials,
            "objectives": plan.criteria.metrics,
            "started_at": time.strftime("%Y-%m-%d %H-%M-%S UTC", time.gmtime()),
            "params": {
                "sweep.gpus": plan.resources.gpus,
                "sweep.sampler": config.search.sampler,
                "sweep.seed": config.seed,
                **plan.space.constants,
            },
            "tags": {
                "workload": config.workload.name,
                "hardware": plan.target.hardware.name,
                "device": plan.target.model,
                "command": command,
                mlflow_store.OBJECTIVES: objectives,
                "git_commit": provenance["git"].get("commit", ""),
                "driver": driver_versions(provenance),
                **versions,
                **{f"space.{name}": exact_value(str(dimension)) for name, dimension in plan.space.dimensions.items()},
                **{name: text for name, text in texts.items() if text},
            },
            "artifacts": {"config.yaml": resolved, "provenance.json": json.dumps(provenance, indent=2)},
        },
    }
