"""`sweeper.run`, `load_results` and `plan_layouts`: the commands as functions, with exceptions for their errors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sweeper.common.exit_codes import INVALID_INPUT
from sweeper.notebook.display import make_display
from sweeper.notebook.packing import space_words, write_function
from sweeper.notebook.process import Outcome, run_process
from sweeper.notebook.result import SweepError, SweepResult, read_result
from workloads.api.errors import UserInputError

if TYPE_CHECKING:
    from sweeper.commands.plan.answer import Answer
    from sweeper.results.mlflow_results import Stored

PREFIX = "sweeper: "  # of an error's line


def run(
    *overrides: str, workload: str | Callable[..., Any] | None = None, space: Mapping[str, Any] | None = None
) -> SweepResult:
    """Run a sweep, or the rest of it, in a process of its own, and return its result.

    Args:
        overrides: the words of the command: "budget.trials=50", "hardware=cpu", "--config-dir=my_conf".
        workload: the name of a workload, or a function of yours. It takes the parameters of the space by name, and
            `rank` and `report` if it has parameters of these names. It returns a number, which is the objective
            `value`, or a dict of metrics, of which `workload.objective=NAME` names the objective.
        space: the parameters by name: a list is a choice, a `range` a range, a text is in the grammar of spaces
            ("interval(0.1, 1)"), another value a constant.

    Raises:
        UserInputError: for what the command refuses, with its message.
        SweepError: the sweep ended without a complete trial.
        KeyboardInterrupt: after the sweep has ended in order. The same call resumes it.
    """
    words = [*overrides, *space_words(space or {})]
    _check(words)
    program = ["sweeper"]
    if callable(workload):
        file = write_function(workload, space or {}, Path(_value_of(words, "dir") or "."))
        program, words = ["sweeper", "function", str(file)], ["workload=function", *words]
    elif workload is not None:
        words = [f"workload={workload}", *words]
    display = make_display(_value_of(words, "progress") or "auto")
    words = [word for word in words if not word.startswith("progress=")]
    outcome = run_process([*program, *words, "progress=json"], display.event)
    display.end()
    return _result(outcome)


def _check(words: list[str]) -> None:
    for word in words:
        if not isinstance(word, str):
            raise UserInputError(f"{word!r}: an override is a text: 'budget.trials=50'")
        if word in ("-m", "--multirun", "plan=true", "--help", "-h", "--version") or word.startswith("--cfg"):
            raise UserInputError(f"{word}: sweeper.run runs one sweep; use the command for this")


def _value_of(words: list[str], key: str) -> str:
    """Return the last value of a key among overrides; empty if none sets it."""
    return next((word.partition("=")[2] for word in reversed(words) if word.startswith(f"{key}=")), "")


def _result(outcome: Outcome) -> SweepResult:
    """Return the result of a process that has ended, or raise what its end stands for."""
    message = "\n".join(line.removeprefix(PREFIX) for line in outcome.errors).strip()
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
        raise SweepError(stopped or _first_reason(result) or "no trial is complete", result)
    return result


def _first_reason(result: SweepResult) -> str:
    """Return how the first trial ended."""
    if not len(result.trials):
        return ""
    first = result.trials.iloc[0]
    return f"no trial is complete; trial {result.trials.index[0]} {first['outcome']}: {first['reason']}"


def load_results(tracking_uri: str | None = None, experiment: str | None = None, sweep: str | None = None) -> Stored:
    """Read the results of sweeps from an MLflow store: `.sweeps` and `.trials` are DataFrames, a row for each.

    Args:
        tracking_uri: the address of the store; by default sqlite:///mlflow.db of the working directory.
        experiment: of this experiment alone.
        sweep: of this sweep alone.

    Raises:
        UserInputError: there is no such store, experiment or sweep, or the store has no results yet.
    """
    from sweeper.results import mlflow_results
    from sweeper.tracking.mlflow_store import check_uri, default_uri

    uri = tracking_uri or default_uri(Path())
    if not uri.startswith("sqlite:"):
        check_uri(uri, "tracking_uri=")
    return mlflow_results.read(uri, experiment, sweep)


def plan_layouts(*words: str, **values: Any) -> Answer:
    """Plan a training on a cluster that you do not have: the fastest layouts of a model on so many GPUs.

    Args:
        words: as of `python -m sweeper plan`: "model=llama3_70b".
        values: the same by name: gpus=64, hardware="h100".

    Raises:
        UserInputError: for a key or a value that is not allowed, or where nothing fits.
    """
    from sweeper.commands.plan.answer import answer
    from sweeper.commands.plan.request import read_request

    named = [f"{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in values.items()]
    return answer(read_request([*words, *named]))
