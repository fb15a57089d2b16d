"""The recording process, which writes the driver's data to MLflow.

    python -m sweeper.tracking.process ANSWERS_FD [LOCK_FD]

The process reads messages from standard input and responds on `ANSWERS_FD`, with one JSON object per line. `LOCK_FD` is
a file descriptor that holds the sweep's lock.

    message                         response
    {"open": {…Store's arguments}}  {"listed": number} repeatedly, then
                                    {"opened": {"experiment_id": …, "written_before": number, "written": [numbers],
                                     "results": {"digest": …, "view": key}, empty unless complete}}
    {"step": {…}}                   {}
    {"record": "…"}                 {"written": number}, with "refused": reason if the store rejects the values,
                                    or {"left_out": number, "refused": reason} if it rejects even a run without values
    {"front": [numbers]}            {}
    {"close": {…}, "view": {…}}     {"ranked": place}, starting from 0, then {"closed": {"view": key or ""}}

If a message fails, the response is {"error": "…", "is_refused": whether the server rejects this user}, and the message
is retried until it succeeds. If the store rejects a message because of its content, the message is set aside so that it
does not block later messages.

The recording process is separate because MLflow takes seconds to import and milliseconds per write. The devices would
wait in the meantime, and a server that hangs would block the driver."""

import io
import json
import os
import queue
import re
import runpy
import sys
import threading
from typing import Any, TextIO

from sqlalchemy import exc

import sweeper.common.rare_collections  # noqa: F401  before MLflow
from sweeper.common.trials import TrialRecord
from sweeper.tracking.mlflow_view import SweepView
from sweeper.tracking.store import MlflowException, Store
from workloads.api.errors import first_line
from workloads.api.notices import notify
from workloads.api.secrets import mask

RETRY_S = 1.0
NO_ANSWER = re.compile(r"API request to (\w+://[^/\s]+)\S* failed with exception")  # a message from MLflow's client
REPORT_MODULE = "sweeper.commands.report.artifact"


class MaskedLog(io.TextIOWrapper):
    """A stream that masks secrets. MLflow prints the server's address, which may contain a password."""

    def write(self, text: str) -> int:
        super().write(mask(text))
        return len(text)


class RecordingProcess:
    """Handles the driver's messages in order, retries each message until it succeeds, and ends after the driver."""

    def __init__(self, answers: TextIO, lock_fd: int | None) -> None:
        self._answers = answers
        self._lock_fd = lock_fd  # while open, keeps other drivers away from the sweep
        os.dup2(2, 1)  # libraries' output goes to the log
        self._messages: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._driver_gone = threading.Event()
        self._last_attempt_failed = False
        self._store: Store | None = None
        self._view_key = ""
        self._has_left_out = False  # whether a trial was left out, which the next run will try to write again
        threading.Thread(target=self._read_messages, daemon=True).start()

    def _read_messages(self) -> None:
        for line in sys.stdin:
            if line.endswith("\n"):
                self._messages.put(json.loads(line))
        self._driver_gone.set()
        self._messages.put(None)

    def run(self) -> None:
        """Handle messages until the driver ends."""
        # If the driver dies, the next driver sends the waiting messages again.
        while (message := self._messages.get()) is not None and not self._driver_gone.is_set():
            while True:
                try:
                    self._answer(self._handle(message))
                    break
                except Exception as failed:  # any error, because retrying a message is harmless
                    error = failed
                    notify(f"{type(error).__name__}: {error}")
                    if is_permanent(error) and not {"open", "close"} & message.keys():
                        try:
                            self._answer(self._set_aside(message, describe_error(error)))
                            break
                        except Exception as second:  # for example, the server is down
                            error = second
                    # Retrying the message does not help if the server rejects this user.
                    is_refused = isinstance(error, MlflowException) and error.get_http_status_code() in (401, 403)
                    self._answer({"error": describe_error(error), "is_refused": is_refused})
                    self._last_attempt_failed = True
                if self._driver_gone.wait(RETRY_S):
                    return
            if "close" in message and message["close"]["status"] != "KILLED":  # an interrupted sweep gets no report
                self._log_report(message["close"].get("digest", ""))

    def _handle(self, message: dict[str, Any]) -> dict[str, Any]:
        if "open" in message:
            store = self._store = Store(**message["open"], on_page=lambda count: self._answer({"listed": count}))
            written = {"written_before": store.written_before, "written": store.children.written_trials}
            return {"opened": {"experiment_id": store.experiment_id, **written, "results": store.stored_results}}
        assert self._store is not None
        if self._last_attempt_failed:
            self._last_attempt_failed = False
            if "record" in message:
                self._store.children.doubt(TrialRecord.from_json(message["record"]).number)
            elif "step" in message:
                self._store.children.doubt(message["step"]["number"])
        if "record" in message:
            record = TrialRecord.from_json(message["record"])
            self._store.write_trial(record)
            return {"written": record.number}
        if "step" in message:
            self._store.write_step(**message["step"])
            return {}
        if "front" in message:
            self._store.write_front(message["front"])
            return {}
        self._store.close(**message["close"] | ({"written": None} if self._has_left_out else {}))
        self._answer({"ranked": 0})
        view = SweepView.from_dict(message["view"])
        self._view_key = ""
        try:
            self._view_key = self._store.write_view(view, lambda place: self._answer({"ranked": place}))
        except MlflowException as error:  # some servers reject experiment tags; no data is lost
            notify(f"no view: {error}")
        return {"closed": {"view": self._view_key}}

    def _set_aside(self, message: dict[str, Any], reason: str) -> dict[str, Any]:
        if "record" not in message:  # a step or the marks of the front
            return {}
        record = TrialRecord.from_json(message["record"])
        assert self._store is not None
        try:
            self._store.set_aside(record, reason)
        except Exception as error:
            if not is_permanent(error):
                raise
            notify(f"trial {record.number}: {type(error).__name__}: {error}")
            self._has_left_out = True
            return {"left_out": record.number, "refused": reason}
        return {"written": record.number, "refused": reason}

    def _answer(self, answer: dict[str, Any]) -> None:
        try:
            self._answers.write(f"{json.dumps(answer)}\n")
        except BrokenPipeError:
            self._driver_gone.set()

    def _log_report(self, digest: str) -> None:
        """Run the program that logs the sweep's report and any errors, then mark the results with this digest as
        complete. The driver does not wait for the report because everything is already written. If the report fails, no
        data is lost. The program runs in this process because a new process would take 2 s to import MLflow again."""
        if self._lock_fd is not None:
            os.close(self._lock_fd)  # a report on thousands of trials takes time, and the sweep may be resumed
            self._lock_fd = None
        assert self._store is not None
        sys.argv = [REPORT_MODULE, self._store.parent_id]
        os.environ["MLFLOW_TRACKING_URI"] = self._store.uri
        try:
            runpy.run_module(REPORT_MODULE, run_name="__main__")
            self._store.finish_results(digest, self._view_key)
        except SystemExit:
            pass  # the program has already printed the error
        except Exception as error:
            notify(f"report not finished: {type(error).__name__}: {error}")


# Errors from a database that is busy or down and may respond next time.
BUSY = (exc.DisconnectionError, exc.InterfaceError, exc.InternalError, exc.OperationalError, exc.TimeoutError)


def is_permanent(error: Exception) -> bool:
    """Return whether the error is due to the message's content, in which case retrying does not help."""
    if isinstance(error.__cause__ or error.__context__, BUSY):  # MLflow reports busy databases as bad requests, too
        return False
    if isinstance(error, MlflowException) and error.get_http_status_code() in (400, 413, 422):
        return True
    return isinstance(error.__cause__ or error, (TypeError, UnicodeError, OverflowError))


def describe_error(error: Exception) -> str:
    """Return the line that states the cause in a database's or server's error."""
    original = getattr(error, "orig", None)
    text = mask(str(original or error).strip())
    if silent := NO_ANSWER.match(text):
        cause: BaseException = error  # find the system's reason, such as "Connection refused", in the chain
        while inner := cause.__cause__ or cause.__context__:
            cause = inner
        return f"{silent[1]} does not respond: {mask(getattr(cause, 'strerror', None) or first_line(cause))}"
    for line in text.splitlines():
        if "OperationalError)" in line:
            return line.split("OperationalError)", 1)[1].strip()[:300]
    return (text.splitlines() or [type(error).__name__])[0][:300]


def main() -> None:
    os.nice(10)  # a lower priority than the driver and trials that are timed on a CPU
    answers = os.fdopen(os.dup(int(sys.argv[1])), "w", 1)  # a copy, because descriptor 1 is redirected to the log below
    sys.stdout = sys.stderr = MaskedLog(sys.stderr.buffer, errors="backslashreplace", line_buffering=True)
    RecordingProcess(answers, int(sys.argv[2]) if sys.argv[2:] else None).run()


if __name__ == "__main__":
    main()
