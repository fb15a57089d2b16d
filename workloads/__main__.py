"""Run one trial in this process and print its measurement as JSON, with files listed by their size in bytes.

python -m workloads matmul m=1024 n=1024 k=1024 dtype=fp32
"""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

from workloads.api.contract import Infeasible, Measurement, Rank, Scalar
from workloads.api.registry import load, names, unknown_reason
from workloads.api.trial import run_trial
from workloads.suggestions import suggest

USAGE_ERROR = 2  # the exit code of argparse
TYPES: dict[Any, str] = {int: "a whole number", float: "a number", bool: "true or false", type(None): "null"}
# The presets of `python -m sweeper workload=…`: in conf/ next to this package, or where conf/ is installed.
BESIDE = Path(__file__).resolve().parents[1]
PRESETS = next((path for path in (BESIDE / "sweeper/conf", BESIDE / "conf") if path.is_dir()), BESIDE) / "workload"


def main(arguments: Sequence[str]) -> None:
    """Run the workload with the `key=value` parameters on the command line. Exits with 2 for invalid input."""
    described = describe_workloads()
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m workloads", None, __doc__, described, formatter_class=formatter)
    parser.add_argument("workload", help="the name of a workload, see below")
    parser.add_argument("parameters", nargs="*", metavar="key=value", default=[], help="the workload's parameters")
    if not arguments:
        parser.error(f"no workload is given\n\n{described}")
    args = parser.parse_args(arguments)
    try:
        parameters = _parse_parameters(args.workload, args.parameters)
    except ValueError as error:
        parser.error(str(error))
    import torch

    rank = Rank(device="cuda" if torch.cuda.is_available() else "cpu")
    try:
        print(format_measurement(run_trial(args.workload, parameters, rank)))
    except Infeasible as error:
        parser.exit(USAGE_ERROR, f"{parser.prog}: {args.workload} cannot run with these parameters: {error}\n")


def describe_workloads(presets: Path = PRESETS) -> str:
    """Return a line for each workload, with its name and the presets that run it in a sweep."""
    running = find_presets(presets)
    width = max(map(len, running))
    lines = [f"  {name:{width}}  {', '.join(presets) or 'none in conf'}" for name, presets in running.items()]
    return "\n".join(["workloads, with their presets for python -m sweeper workload=PRESET:", *lines])


def find_presets(folder: Path = PRESETS) -> dict[str, list[str]]:
    """Return the workloads' names, each mapped to the presets in the folder that run it."""
    running: dict[str, list[str]] = {name: [] for name in names()}
    for path in sorted(folder.glob("*.yaml")):
        if match := re.search(r"^workload:\s*\{?\s*name: *(\w+)", path.read_text(), re.MULTILINE):
            running.setdefault(match[1], []).append(path.stem)
    return running


def format_measurement(measurement: Measurement) -> str:
    """Return a measurement as JSON. Files are bytes, which JSON cannot represent, so only their sizes are listed."""
    files = {name: len(content) for name, content in measurement.files.items()}
    return json.dumps({**asdict(measurement), "files": files}, indent=2)


def _parse_parameters(workload: str, pairs: Sequence[str]) -> dict[str, Scalar]:
    if workload not in names():
        raise ValueError(f"{workload}: {unknown_reason(workload)}")
    parameters_class = load(workload).Parameters
    if load(workload).Settings is not None:
        raise ValueError(f"{workload} needs settings: run it with python -m sweeper workload={workload}")
    annotations = get_type_hints(parameters_class)
    texts = dict(pair.partition("=")[::2] for pair in pairs)
    if unknown := [key for key in texts if key not in annotations]:
        raise ValueError(f"{workload} has no parameter {unknown[0]!r}. {suggest(unknown[0], annotations)}")
    required = {item.name for item in fields(parameters_class) if item.default is item.default_factory is MISSING}
    if missing := required - texts.keys():
        raise ValueError(f"{workload} needs a value for {', '.join(sorted(missing))}")
    parameters = {key: _parse_value(key, text, annotations[key]) for key, text in texts.items()}
    for item in fields(parameters_class):
        least, most = item.metadata.get("min", -sys.float_info.max), item.metadata.get("max", sys.float_info.max)
        if isinstance(value := parameters.get(item.name), int | float) and not least <= value <= most:
            allowed = f"at least {least}" if not value >= least else f"at most {most}"
            raise ValueError(f"{workload}: {item.name}={value}: must be {allowed}")
    try:
        parameters_class(**parameters)
    except ValueError as error:
        raise ValueError(f"{workload}: {error}") from error
    return parameters


def _parse_value(key: str, text: str, annotation: Any) -> Scalar:
    options = _list_options(annotation)
    named = {"null": None, "true": True, "false": False}
    if text in named and type(named[text]) in options:
        return named[text]
    for option in (kind for kind in (int, float) if kind in options):
        with suppress(ValueError):
            return option(text)
    if str in options or text in options:
        return text
    raise ValueError(f"{key}={text}: must be {' or '.join(TYPES.get(option, str(option)) for option in options)}")


def _list_options(annotation: Any) -> list[Any]:
    """Return the types and values that an annotation allows."""
    parts = get_args(annotation)
    return [option for part in parts for option in _list_options(part)] if parts else [annotation]


if __name__ == "__main__":
    main(sys.argv[1:])
