"""MLflow: one parent run a sweep, one child run a trial. Runs as a process of its own, beside the driver.

    python -m sweeper.tracking.process      reads messages from standard input, a JSON object a line, and answers so

The study on disk is the truth and this is its projection: everything written here can be written again, and
is written once. So the process may be killed at any instant, the server may go away, and whoever comes next
finishes what is missing.

Apart from the driver because MLflow takes seconds to import and milliseconds to write, which the devices
would wait for, and because a server that hangs must hang nobody else.
"""

from __future__ import annotations

import fcntl
import json
import os
import queue
import re
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
# Few and short tries inside one call: the loop below tries for as long as it takes, and says so.
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunTag
from mlflow.exceptions import MlflowException

from sweeper.common.secrets import mask
from sweeper.common.trials import TrialRecord, TrialStatus
from sweeper.ui.tables import run_name, short

# MLflow knows three ways to end. Which of our six it was is the tag `outcome`.
STATUS = {
    TrialStatus.COMPLETE: "FINISHED",
    TrialStatus.PRUNED: "FINISHED",
    TrialStatus.INFEASIBLE: "FAILED",
    TrialStatus.FAILED: "FAILED",
}
RETRY_S = 1.0
REPORT = "report.html"
NOTE = "mlflow.note.content"  # MLflow shows it as the run's description


@contextmanager
def _alone_in_making(uri: str) -> Iterator[None]:
    """Processes that come to a new SQLite file together take turns: one was seen to fail in the middle of the other's
    migrations, and to record nothing. Where the folder cannot be locked they do not."""
    if not uri.startswith("sqlite:///"):
        yield
        return
    folder = os.open(Path(uri.removeprefix("sqlite:///")).parent, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


class Store:
    """The runs of one sweep in an MLflow store."""

    def __init__(self, uri: str, experiment: str, study: str, sweep: str, parent: Mapping[str, Any]) -> None:
        """Find or make the experiment and the parent run, and see which trials are there already.

        `study` is the identity of the sweep's study, under which its runs are found; `parent` holds the
        parent's `tags`, `params` and text `artifacts`.
        """
        self._study, self._sweep, self._tags = study, sweep, parent["tags"]
        with _alone_in_making(uri):
            self._client = MlflowClient(tracking_uri=uri)
            self.experiment_id = self._experiment(experiment)
        self.parent_id = self._parent(sweep, parent)
        self._children: dict[int, Any] = {}
        self.look_again()

    def look_again(self) -> None:
        """See which trials there are. Needed after any failure: what a server did before it went away is not known.

        Of two runs of one trial, the one whole if there is one stays.
        """
        self._children = {}
        for run in sorted(self._runs("trial"), key=lambda run: run.info.status == "RUNNING"):
            number = int(run.data.tags["sweeper.trial"])
            if number in self._children:
                self._client.delete_run(run.info.run_id)
            else:
                self._children[number] = run

    def written(self) -> list[int]:
        """The numbers of the trials that are there, whole, as of the last look."""
        return [number for number, run in self._children.items() if run.info.status != "RUNNING"]

    def write(self, record: TrialRecord) -> None:
        """Write one trial. Harmless if some or all of it is there already."""
        end_ms = int(record.ended_at_s * 1e3)
        run_id = self._child(
            record.number, run_name(record.number, record.params, record.remeasurement), record.started_at_s
        )
        tags = {
            "outcome": record.status.value,
            **(
                {"again_of": record.remeasurement.trial, "round": record.remeasurement.round}
                if record.remeasurement
                else {}
            ),
            "attempts": record.attempts,
            "reason": record.reason,
            # What tells runs of different sweeps apart, as columns beside the metrics.
            "sweep": self._sweep,
            "hardware": self._tags.get("hardware", ""),
            "device": self._tags.get("device", ""),
            **_facts(record),
            **record.where,
        }
        metrics = {**record.metrics, "trial_time_s": record.ended_at_s - record.started_at_s}
        self._client.log_batch(
            run_id,
            metrics=[Metric(_legal(name), value, end_ms, 0) for name, value in metrics.items()],
            params=[Param(_legal(name), short(value)) for name, value in record.params.items()],
            tags=[RunTag(name, str(value)[:5000]) for name, value in tags.items() if value not in ("", None)],
        )
        self._client.log_text(run_id, record.to_json(), "trial.json")
        if record.detail:
            self._client.log_text(run_id, record.detail, "last_lines.txt")
        for path in filter(os.path.exists, record.files):  # a user may have cleared them away since
            self._client.log_artifact(run_id, path)
        self._client.set_terminated(run_id, STATUS.get(record.status, "KILLED"), end_ms)

    def write_step(self, number: int, name: str, step: int, at_s: float, step_metrics: Mapping[str, float]) -> None:
        """A step of a trial that runs, as a point of the metrics `steps/…`."""
        run_id = self._child(number, name, at_s)
        metrics = [Metric(_legal(f"steps/{key}"), value, int(at_s * 1e3), step) for key, value in step_metrics.items()]
        self._client.log_batch(run_id, metrics=metrics)

    def _child(self, number: int, name: str, started_at_s: float) -> str:
        """The trial's run, made where there is none."""
        if number not in self._children:
            self._children[number] = self._client.create_run(
                self.experiment_id,
                start_time=int(started_at_s * 1e3),
                run_name=name,
                tags={
                    "mlflow.parentRunId": self.parent_id,
                    "sweeper.study": self._study,
                    "sweeper.kind": "trial",
                    "sweeper.trial": str(number),
                },
            )
        return str(self._children[number].info.run_id)

    def close(
        self,
        status: str,
        metrics: Mapping[str, float],
        tags: Mapping[str, str],
        artifacts: Mapping[str, str],
        pictures: Sequence[str],
        abandoned: Sequence[int] = (),
    ) -> None:
        """End the parent run with the sweep's results: `artifacts` are texts by name, `pictures` are files.

        abandoned: trials that will not run again and have no record; one that told steps has a run
        """
        now_ms = int(time.time() * 1e3)
        for run in (self._children[number] for number in abandoned if number in self._children):
            self._client.set_tag(run.info.run_id, "outcome", TrialStatus.CANCELLED.value)
            self._client.set_terminated(run.info.run_id, "KILLED", now_ms)
        self._client.log_batch(
            self.parent_id,
            metrics=[Metric(_legal(name), value, now_ms, 0) for name, value in metrics.items()],
            tags=[RunTag(name, value) for name, value in tags.items()],
        )
        for path, text in artifacts.items():
            self._client.log_text(self.parent_id, text, path)
        for path in pictures:
            self._client.log_artifact(self.parent_id, path, "pictures")
        self._client.set_terminated(self.parent_id, status, now_ms)

    def report(self) -> None:
        """The report on this sweep alone, as an artifact of the parent run, whose description then names it."""
        from sweeper.report import charts, page, store, summary

        stored = store.of_study(self._client, self.experiment_id, self._study)
        text = page.page(f"sweeper: {self._sweep}", summary.tables(stored, None), list(charts.figures(stored)))
        self._client.log_text(self.parent_id, text, REPORT)
        there = f"#/experiments/{self.experiment_id}/runs/{self.parent_id}/artifacts/{REPORT}"
        note = self._client.get_run(self.parent_id).data.tags.get(NOTE, "")
        self._client.set_tag(self.parent_id, NOTE, f"{note}\n\nReport: [{REPORT}]({there}), among the artifacts")

    def _experiment(self, name: str) -> str:
        if found := self._client.get_experiment_by_name(name):
            if found.lifecycle_stage == "deleted":
                self._client.restore_experiment(found.experiment_id)
            return str(found.experiment_id)
        try:
            # The kind that MLflow shows with run tables and charts, not as a chat application.
            return str(self._client.create_experiment(name, tags={"mlflow.experimentKind": "custom_model_development"}))
        except MlflowException:  # another sweep was faster
            if found := self._client.get_experiment_by_name(name):
                return str(found.experiment_id)
            raise

    def _parent(self, sweep: str, parent: Mapping[str, Any]) -> str:
        tags = {name: str(value) for name, value in parent["tags"].items()}
        artifacts = dict(parent["artifacts"])
        if runs := self._runs("sweep"):
            run_id, earlier = str(runs[0].info.run_id), runs[0].data.tags
            self._client.update_run(run_id, status="RUNNING")
            # What ran is what is written: what another start says otherwise is added, and takes nothing's place.
            tags = {name: _both(earlier.get(name, ""), value) for name, value in tags.items()}
            if earlier.get("sweeper.began") != parent["began"]:
                differs = any(earlier.get(name) != value for name, value in tags.items())
                artifacts = {f"since {parent['began']}/{path}": text for path, text in artifacts.items() if differs}
        else:
            tags["sweeper.began"] = parent["began"]
            kind = {"sweeper.study": self._study, "sweeper.kind": "sweep"}
            run_id = str(self._client.create_run(self.experiment_id, run_name=sweep, tags=kind).info.run_id)
        self._client.log_batch(
            run_id,
            params=[Param(_legal(name), short(value)) for name, value in parent["params"].items()],
            tags=[RunTag(name, value) for name, value in tags.items()],
        )
        for path, text in artifacts.items():
            self._client.log_text(run_id, text, path)
        return run_id

    def _runs(self, kind: str) -> list[Any]:
        where = f"tags.`sweeper.study` = '{self._study}' and tags.`sweeper.kind` = '{kind}'"
        runs, token = [], None
        while True:
            page = self._client.search_runs([self.experiment_id], where, max_results=1000, page_token=token)
            runs += page
            token = page.token
            if not token:
                return runs


def _both(earlier: str, now: str) -> str:
    """A line for each that was said."""
    return earlier if now in earlier.splitlines() else f"{earlier}\n{now}".strip()


def _facts(record: TrialRecord) -> dict[str, Any]:
    """Of what the ranks saw: the type, whose attention they computed with, what a GPU may draw, and whether the machine
    slowed one down meanwhile."""
    if not record.measurements:
        return {}
    machine_info = [measurement["machine_info"] for measurement in record.measurements]
    limits = {watts for seen in machine_info if (watts := seen.get("power_limit_w"))}
    return {
        "dtype": record.measurements[0]["matrix_dtype"],
        "attention": " or ".join(sorted({str(seen["attention"]) for seen in machine_info if "attention" in seen})),
        "power_limit_w": " or ".join(f"{watts:g}" for watts in sorted(limits)),
        "slowed_by": " ".join(
            sorted({word for seen in machine_info for word in str(seen.get("slowed_by", "")).split()})
        ),
        "tainted": "yes" if any(seen.get("tainted") for seen in machine_info) else "",
    }


def _legal(name: str) -> str:
    """The name with what MLflow allows in it."""
    return re.sub(r"[^\w\-. :/]", "_", name)


# ── the process ─────────────────────────────────────────────────────────────────────────────────────────────


class Process:
    """Does what the messages say, in order, each for as long as it takes; ends when the driver has.

    lock: a file that keeps others from the sweep for as long as it is open
    """

    def __init__(self, answers: TextIO, lock: int | None) -> None:
        self._answers, self._lock = answers, lock
        os.dup2(2, 1)
        self._messages: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._driver_gone = threading.Event()
        self._unsure = False  # whether the last try may have done something
        self._store: Store | None = None
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in sys.stdin:
            if line.endswith("\n"):
                self._messages.put(json.loads(line))
        self._driver_gone.set()
        self._messages.put(None)

    def run(self) -> None:
        # What is still waiting when the driver is gone, its successor hands over again.
        while (message := self._messages.get()) is not None and not self._driver_gone.is_set():
            while True:
                try:
                    self._say(self._do(message))
                    self._report_after(message)
                    break
                except Exception as error:  # whatever it is, nothing is lost by trying again
                    print(mask(f"{type(error).__name__}: {error}"), file=sys.stderr, flush=True)
                    self._say({"trouble": _what(error)})
                    self._unsure = True
                if self._driver_gone.wait(RETRY_S):
                    return

    def _report_after(self, message: dict[str, Any]) -> None:
        """Once the driver knows that everything is written: nobody waits for it, and if it fails nothing is lost."""
        interrupted = message.get("close", {}).get("status") == "KILLED"
        if "close" not in message or interrupted:
            return
        if self._lock is not None:
            os.close(self._lock)  # a report on thousands of trials takes a while, and the sweep may go on
            self._lock = None
        try:
            assert self._store is not None
            self._store.report()
        except Exception as error:
            print(mask(f"no {REPORT}: {type(error).__name__}: {error}"), file=sys.stderr, flush=True)

    def _say(self, answer: dict[str, Any]) -> None:
        try:
            print(json.dumps(answer), file=self._answers, flush=True)
        except BrokenPipeError:
            self._driver_gone.set()

    def _do(self, message: dict[str, Any]) -> dict[str, Any]:
        if "open" in message:
            self._store = Store(**message["open"])
            ids = {"experiment_id": self._store.experiment_id, "run_id": self._store.parent_id}
            return {"opened": {**ids, "written": self._store.written()}}
        assert self._store is not None
        if self._unsure:
            self._store.look_again()
            self._unsure = False
        if "step" in message:
            self._store.write_step(**message["step"])
            return {}
        if "record" in message:
            record = TrialRecord.from_json(message["record"])
            self._store.write(record)
            return {"written": record.number}
        self._store.close(**message["close"])
        return {"closed": True}


def _what(error: Exception) -> str:
    """The part of a database's or a server's error that tells a person something."""
    original = getattr(error, "orig", None)
    text = mask(str(original or error).strip())
    for line in text.splitlines():
        if "OperationalError)" in line:
            return line.split("OperationalError)", 1)[1].strip()[:300]
    return (text.splitlines() or [type(error).__name__])[0][:300]


def main() -> None:
    os.nice(10)  # behind the driver, and behind trials that are timed on a CPU
    # What libraries print must not be taken for an answer: answers keep the pipe, prints go to the log.
    Process(os.fdopen(os.dup(1), "w"), int(sys.argv[1]) if sys.argv[1:] else None).run()


if __name__ == "__main__":
    main()
