"""Commands as Python functions that raise exceptions: `sweeper.run`, `load_results` and `plan_layouts`."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import sweeper
from sweeper.cli.exits import INVALID_INPUT, SIGNALS, interpreter
from sweeper.notebook.display import make_display
from sweeper.notebook.packing import space_words, write_function
from sweeper.notebook.result import SweepError, SweepResult, read_result
from workloads.api.errors import UserInputError

if TYPE_CHECKING:
    from sweeper.commands.plan.answer import Answer
    from sweeper.results.mlflow_results import Stored

NO_SWEEP = ("-m", "--multirun", "--help", "-h", "--version")  # flags with which the command does not run a single sweep
PATIENCE_S = 2.0  # how long to wait for output from processes that outlive the sweep, such as the report's writer


def run(
    *overrides: str | Callable[..., Any],
    workload: str | Callable[..., Any] | None = None,
    space: Mapping[str, Any] | None = None,
) -> SweepResult:
    """Run or resume a sweep in a new process, and return its result.

    Args:
        overrides: the arguments of the command: "budget.trials=50", "hardware=cpu", "--config-dir=my_conf". To measure
            your own function, pass it as the first argument.
        workload: the name of a workload, or your function. The function receives the space's parameters by name, and
            also `rank` and `report` if it has parameters with these names. The result is a number, which becomes the
            objective `value`, or a dict of metrics, from which `workload.objective=NAME` selects the objective.
        space: entries by parameter name. A list is a choice, a `range` is a range, a string is parsed as in YAML
            ("interval(0.1, 1)"), and any other value is a constant.

    Raises:
        UserInputError: the command rejected its input and printed this message.
        SweepError: the sweep ended with no complete trials.
        KeyboardInterrupt: after the sweep has shut down gracefully. The same call resumes the sweep.
    """
    if overrides and callable(overrides[0]):
        if workload is not None:
            raise UserInputError(f"workload={workload!r}: the first argument is a function; give one of them")
        workload, *overrides = overrides  # type: ignore[assignment]
    words = []
    for word in (*overrides, *space_words(space or {})):
        if not isinstance(word, str):
            raise UserInputError(f"{word!r}: an override is a text: 'budget.trials=50'; a function comes first")
        words.append(word)
    program = ["sweeper"]
    if callable(workload):
        file = write_function(workload, space or {}, Path(_value_of(words, "dir") or "."))
        program, words = ["sweeper", "function", str(file)], ["workload=function", *words]
    elif workload is not None:
        words = [f"workload={workload}", *words]
    for word in words:
        if word in NO_SWEEP or (word.startswith(("--cfg", "plan=")) and word != "plan=false"):
            command = shlex.join([interpreter(), "-m", *program, *words])
            raise UserInputError(f"{word}: sweeper.run runs one sweep; the command does this: {command}")
    display = make_display(_value_of(words, "progress") or "auto")
    words = [word for word in words if not word.startswith("progress=")]
    return _read_result(_run_process([*program, *words, "progress=json"], display.event))


def _value_of(words: list[str], key: str) -> str:
    return next((word.partition("=")[2] for word in reversed(words) if word.startswith(f"{key}=")), "")


def load_results(tracking_uri: str | None = None, experiment: str | None = None, sweep: str | None = None) -> Stored:
    """Read sweep results from an MLflow store. `.sweeps` and `.trials` are DataFrames with a row per sweep or trial.

    Args:
        tracking_uri: the address of the store (default: sqlite:///mlflow.db in the working directory).
        experiment: read only this experiment.
        sweep: read only this sweep.

    Raises:
        UserInputError: the store, experiment or sweep does not exist, or the store has no results yet.
    """
    from sweeper.results import mlflow_results
    from sweeper.tracking.mlflow_store import check_uri, default_uri

    uri = tracking_uri or default_uri(Path())
    if not uri.startswith("sqlite"):
        check_uri(uri, "tracking_uri=")
    return mlflow_results.read(uri, experiment, sweep)


def plan_layouts(*words: str, **values: Any) -> Answer:
    """Plan training on a cluster that you may not have: find a model's fastest layouts on a given number of GPUs.

    Args:
        words: arguments of `python -m sweeper plan`, such as "model=llama3_70b".
        values: arguments by name, such as gpus=64 and hardware="h100".

    Raises:
        UserInputError: a key or value is not allowed, or no layout fits.
    """
    from sweeper.commands.plan.answer import answer
    from sweeper.commands.plan.request import read_request

    named = [f"{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in values.items()]
    return answer(read_request([*words, *named]))


@dataclass
class Outcome:
    code: int = 0
    end: dict[str, Any] | None = None  # the `end` event of `progress=json`; None if the sweep did not reach its end
    errors: list[str] = field(default_factory=list)  # other output to standard error
    output: list[str] = field(default_factory=list)  # output to standard output
    is_interrupted: bool = False  # a Ctrl-C was forwarded to the process


def _read_result(outcome: Outcome) -> SweepResult:
    message = "\n".join(line.removeprefix("sweeper: ") for line in outcome.errors).strip()
    if outcome.code == INVALID_INPUT:
        raise UserInputError(message)
    if outcome.is_interrupted:
        raise KeyboardInterrupt
    if outcome.end is None:
        raise SweepError(message or f"the sweep's process ended with code {outcome.code}")
    stopped = str(outcome.end["stopped"])
    summary = "".join(outcome.output)
    result = read_result(Path(outcome.end["folder"]), exit_code=outcome.code, stopped=stopped, summary=summary)
    if result.best is None:
        reason = result.describe_unmet() or "no trial is complete"
        if reason.endswith("complete") and len(result.trials):
            first = result.trials.iloc[0]
            reason += f"; trial {result.trials.index[0]} {first['outcome']}: {first['reason']}"
        raise SweepError(stopped or reason, result)
    return result


def _run_process(words: Sequence[str], on_event: Callable[[dict[str, Any]], None]) -> Outcome:
    """Run `python -m` with these arguments until it ends, passing on events in order. A KeyboardInterrupt is forwarded
    as SIGINT, so the sweep shuts down gracefully. A second interrupt ends the sweep at once. In the main thread,
    SIGTERM and SIGHUP (from a batch system or a closed terminal) are forwarded too."""
    # PYTHONPATH lets the process find this package. Notebook kernels request colors, which do not belong in a summary.
    paths = [str(Path(sweeper.__file__).resolve().parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    kept = {name: value for name, value in os.environ.items() if name not in ("FORCE_COLOR", "CLICOLOR_FORCE")}
    outcome = Outcome()
    process = subprocess.Popen(
        [sys.executable, "-m", *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**kept, "PYTHONPATH": os.pathsep.join(paths)},
        start_new_session=True,  # an interrupt in a notebook would reach every process in the kernel's group
    )
    assert process.stdout is not None and process.stderr is not None
    readers = [
        threading.Thread(target=_read_events, args=(process.stderr, outcome, on_event), daemon=True),
        threading.Thread(target=outcome.output.extend, args=(process.stdout,), daemon=True),
    ]
    for reader in readers:
        reader.start()
    is_main = threading.current_thread() is threading.main_thread()
    handled = SIGNALS[1:] if is_main else ()
    previous = [(signum, signal.signal(signum, lambda number, _: process.send_signal(number))) for signum in handled]
    try:
        while True:
            try:
                process.wait()
                break
            except KeyboardInterrupt:
                outcome.is_interrupted = True
                with suppress(ProcessLookupError):
                    process.send_signal(signal.SIGINT)
    finally:
        for signum, handler in previous:
            signal.signal(signum, handler)
    for reader in readers:
        reader.join(PATIENCE_S)
    outcome.code = process.returncode
    return outcome


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
