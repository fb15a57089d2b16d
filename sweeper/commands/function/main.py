"""Run a sweep of a Python function that `sweeper.run` packed into a file.

    python -m sweeper function FILE key=value ...

`sweeper.run` starts this command. To resume a sweep, run it in a shell. FILE contains code: run only your own files.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from sweeper.cli.arguments import parse_arguments
from sweeper.cli.composition import compose_sweeps
from sweeper.cli.exits import exit_with, interpreter
from sweeper.commands.sweep.main import run_sweep
from workloads.api import registry
from workloads.api.contract import Workload
from workloads.api.errors import UserInputError


def main(words: Sequence[str]) -> None:
    """Run the sweep and exit with the same codes as `python -m sweeper`."""
    exit_with(lambda: _run(words))


def _run(words: Sequence[str]) -> int:
    if not words or words[0] in ("--help", "-h"):
        print((__doc__ or "").strip())
        return 0
    path, rest = Path(words[0]), words[1:]
    function = read_function(path)
    sweeps = compose_sweeps(parse_arguments(rest))
    if len(sweeps) != 1:
        raise UserInputError("sweeper function: runs one sweep; give each key one value")
    return run_sweep(replace(sweeps[0], workload=function), [interpreter(), "-m", "sweeper", "function", *words])


def read_function(path: Path) -> Workload:
    """Read a packed function's workload without loading the function. Raises UserInputError for any other file."""
    workload = registry.load("function")
    assert workload.Settings is not None
    try:
        return workload.with_settings(workload.Settings(**json.loads(path.read_text())))
    except (ValueError, TypeError) as error:
        raise UserInputError(f"{path}: not a function that sweeper.run has packed") from error
