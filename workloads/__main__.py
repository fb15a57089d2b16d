"""Run one trial in this process and print its measurement as JSON, with files listed by their size in bytes.

python -m workloads matmul m=1024 n=1024 k=1024 dtype=fp32
"""

import argparse
import json
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import asdict

from workloads.api.contract import Infeasible, Measurement, Rank, Scalar
from workloads.api.errors import UserInputError
from workloads.api.registry import load, names, unknown_reason
from workloads.api.trial import run_trial
from workloads.api.validation import build, keys_of, read_value

USAGE_ERROR = 2  # the exit code of argparse


def main(arguments: Sequence[str]) -> None:
    """Run the workload with the `key=value` parameters on the command line. Exits with 2 for invalid input."""
    described = f"workloads: {', '.join(names())}"
    if arguments and arguments[0] in names():
        described = describe_parameters(arguments[0])
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m workloads", None, __doc__, described, formatter_class=formatter)
    parser.add_argument("workload", help="the name of a workload, see below")
    parser.add_argument("parameters", nargs="*", metavar="key=value", default=[], help="the workload's parameters")
    if not arguments:
        parser.error(f"no workload is given\n\n{described}")
    args = parser.parse_args(arguments)
    try:
        parameters = _parse_parameters(args.workload, args.parameters)
    except UserInputError as error:
        parser.error(str(error))
    import torch

    rank = Rank(device="cuda" if torch.cuda.is_available() else "cpu")
    try:
        print(format_measurement(run_trial(args.workload, parameters, rank)))
    except Infeasible as error:
        parser.exit(USAGE_ERROR, f"{parser.prog}: {args.workload} cannot run with these parameters: {error}\n")


def describe_parameters(name: str) -> str:
    """Return the meaning, the unit, the allowed values and the default of each parameter of a workload."""
    texts = [f"  {key.name:20} {key.describe()}" for key in keys_of(load(name).Parameters)]
    rows = [textwrap.fill(text, 100, subsequent_indent=" " * 23) for text in texts]
    return "\n".join([f"parameters of {name}, key=value:", *rows])


def format_measurement(measurement: Measurement) -> str:
    """Return a measurement as JSON. Files are bytes, which JSON cannot represent, so only their sizes are listed."""
    files = {name: len(content) for name, content in measurement.files.items()}
    return json.dumps({**asdict(measurement), "files": files}, indent=2)


def _parse_parameters(name: str, pairs: Sequence[str]) -> dict[str, Scalar]:
    if name not in names():
        raise UserInputError(f"{name}: {unknown_reason(name)}")
    workload = load(name)
    if workload.Settings is not None:
        raise UserInputError(f"{name} needs settings: run it with python -m sweeper workload={name}")
    keys = {key.name: key for key in keys_of(workload.Parameters)}
    texts = dict(pair.partition("=")[::2] for pair in pairs)
    values = {key: read_value(keys[key], text) if key in keys else text for key, text in texts.items()}
    parameters = build(workload.Parameters, values, f"{name}: ")
    return {key: getattr(parameters, key) for key in values}


if __name__ == "__main__":
    main(sys.argv[1:])
