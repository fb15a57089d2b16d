"""Run one trial in this process and print its measurement as JSON, of its files the size in bytes.

python -m workloads matmul m=1024 n=1024 k=1024 dtype=fp32
"""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, asdict, fields
from typing import Any, get_args, get_type_hints

from workloads.api.contract import Infeasible, Measurement, Rank, Scalar
from workloads.api.registry import load, names
from workloads.api.trial import run_trial

USAGE_ERROR = 2  # as argparse exits


def main(arguments: Sequence[str]) -> None:
    """Run the workload with the `key=value` parameters of the command line. Exits with 2 for invalid input.

    Parameters that cannot work on this device are invalid input, too.
    """
    parser = argparse.ArgumentParser(
        prog="python -m workloads", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("workload", help=f"one of {', '.join(names())}")
    parser.add_argument("parameters", nargs="*", metavar="key=value", default=[], help="the workload's parameters")
    if not arguments:
        parser.error(f"no workload is given. {_suggest('', names())}")
    args = parser.parse_args(arguments)
    try:
        parameters = _parse_parameters(args.workload, args.parameters)
    except ValueError as error:
        parser.error(str(error))
    import torch

    rank = Rank(device="cuda" if torch.cuda.is_available() else "cpu")
    try:
        measurement = run_trial(args.workload, parameters, rank)
    except Infeasible as error:
        parser.exit(USAGE_ERROR, f"{parser.prog}: {args.workload} cannot run with these parameters: {error}\n")
    print(format_measurement(measurement))


def format_measurement(measurement: Measurement) -> str:
    """Return a measurement as JSON. A file is bytes, which JSON cannot hold: it is listed with its size."""
    files = {name: len(content) for name, content in measurement.files.items()}
    return json.dumps({**asdict(measurement), "files": files}, indent=2)


def _parse_parameters(workload: str, pairs: Sequence[str]) -> dict[str, Scalar]:
    """Return the parameters with values of the annotated types.

    Raises:
        ValueError: the workload or a key is unknown, a key is missing, or the values are invalid together.
    """
    if workload not in names():
        raise ValueError(f"unknown workload {workload!r}. {_suggest(workload, names())}")
    parameters_class = load(workload).Parameters
    if load(workload).Settings is not None:
        raise ValueError(f"{workload} needs settings: run it with python -m sweeper workload={workload}")
    annotations = get_type_hints(parameters_class)
    texts = dict(pair.partition("=")[::2] for pair in pairs)
    if unknown := [key for key in texts if key not in annotations]:
        raise ValueError(f"{workload} has no parameter {unknown[0]!r}. {_suggest(unknown[0], annotations)}")
    if missing := _required(parameters_class) - texts.keys():
        raise ValueError(f"{workload} needs a value for {', '.join(sorted(missing))}")
    parameters = {key: _parse_value(text, annotations[key]) for key, text in texts.items()}
    _check_together(workload, parameters_class, parameters)
    return parameters


def _required(parameters_class: type[Any]) -> set[str]:
    """Return the names of the fields without a default."""
    without_default = [field for field in fields(parameters_class) if field.default is MISSING]
    return {field.name for field in without_default if field.default_factory is MISSING}


def _check_together(workload: str, parameters_class: type[Any], parameters: Mapping[str, Scalar]) -> None:
    """Raise ValueError, with the workload's name, for values that the workload does not accept together."""
    try:
        parameters_class(**parameters)
    except ValueError as error:
        raise ValueError(f"{workload}: {error}") from error


def _suggest(name: str, available: Iterable[str]) -> str:
    """Return the available names and the nearest of them."""
    available = sorted(available)
    nearest = difflib.get_close_matches(name, available, n=1)
    return f"Available: {', '.join(available)}.{f' Did you mean {nearest[0]}?' if nearest else ''}"


def _parse_value(text: str, annotation: Any) -> Scalar:
    """Return the text as the first type of the annotation that accepts it."""
    options = get_args(annotation) or (annotation,)
    if bool in options and text in ("true", "false"):
        return text == "true"
    for option in (int, float):
        if option in options:
            try:
                return option(text)
            except ValueError:
                continue
    return text


if __name__ == "__main__":
    main(sys.argv[1:])
