"""Run one trial in this process and print its measurement.

python -m workloads matmul m=1024 n=1024 k=1024 dtype=fp32
"""

from __future__ import annotations

import json
import sys
from dataclasses import MISSING, asdict, fields
from typing import Any, get_args, get_type_hints

from workloads.api.contract import Rank, Scalar
from workloads.api.registry import load, names
from workloads.api.trial import run_trial


def main(arguments: list[str]) -> None:
    """Run the workload named first with the `key=value` parameters that follow. Exits with 1 for invalid input."""
    if not arguments or arguments[0] not in names():
        sys.exit(f"{__doc__}\nAvailable workloads: {', '.join(names())}")
    name, *pairs = arguments
    types = get_type_hints(load(name).Parameters)
    given = dict(pair.partition("=")[::2] for pair in pairs)
    required = {field.name for field in fields(load(name).Parameters) if field.default is MISSING}
    if set(given) - set(types) or required - set(given):
        sys.exit(f"{name}: parameters are {', '.join(types)}; required are {', '.join(sorted(required)) or 'none'}")
    parameters = {key: _parse(text, types[key]) for key, text in given.items()}
    import torch

    rank = Rank(device="cuda" if torch.cuda.is_available() else "cpu")
    print(json.dumps(asdict(run_trial(name, parameters, rank)), indent=2))


def _parse(text: str, annotation: Any) -> Scalar:
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
