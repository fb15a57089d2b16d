"""How each trainer's log reports a step: the line, its names and its units, from the rows of `log_formats.toml`."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from workloads.tables import read_toml

GIB = 2**30
NUMBER = r"[-+]?\d[\d,]*(?:\.\d+)?(?:[eE][-+]?\d+)?"
# A number, optionally with a suffix for powers of 1,000, which some programs write.
VALUE = rf"(?:{NUMBER}(?:[KMBGTPE](?:FLOPS)?\b)?|[-+]?(?:nan|NaN|NAN|inf|Inf)\b)"
SUFFIXES = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
Metrics = Mapping[str, tuple[str, float]]  # printed name to our name and the factor to our unit

# Values that `LogReader._derive` uses to compute metrics, and that are not results themselves.
RATES = ("batches_per_s", "samples_per_s", "total_tokens")
# Matches `name: value | name: value`; the colon is optional.
BARS = r"(?:^|\|)\s*(?P<name>[^|\s](?:[^|]*?[^|\s:])?)(?:\s*:\s*|\s+)(?P<value>VALUE)"


@dataclass(frozen=True)
class LogFormat:
    """How one trainer reports a step. One log may contain steps in several formats of a `family`."""

    program: str
    hint: str  # text in every line that `step` matches
    step: re.Pattern[str]  # group 1 is the step's number
    metrics: Metrics
    pairs: tuple[re.Pattern[str], ...]  # each matches a name and a value
    body: re.Pattern[str] | None = None  # matches lines with metrics below the step's line
    family: str = ""  # defaults to the program
    is_library: bool = False  # other trainers run on this library and print their own lines
    flops: str = "its own"  # the program's convention for counting FLOPs
    dtype: str = ""  # the default data type, which the program does not print
    is_of_interval: bool = False  # the printed time covers all steps since the last step line
    has_equal_steps: bool = True  # each step counts the same number of tokens, including padding
    counts_model_replicas: bool = False  # the rate `per GPU` is per data- or context-parallel rank

    @property
    def log_family(self) -> str:
        return self.family or self.program


def _compile(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern.replace("BARS", BARS).replace("VALUE", VALUE))


def _build_format(row: dict[str, Any], rows: Mapping[str, dict[str, Any]]) -> LogFormat:
    values = {**(rows[row["like"]] if "like" in row else {}), **row}
    values.pop("like", "")
    metrics = [*(rows[values.pop("metrics_like")]["metrics"] if "metrics_like" in values else ())]
    metrics += values.get("metrics", ())
    values["metrics"] = {printed: (name, factor) for name, factor, *names in metrics for printed in names}
    values["pairs"] = tuple(map(_compile, values.get("pairs", ["BARS"])))
    patterns: dict[str, Any] = {name: _compile(values[name]) for name in ("step", "body") if name in values}
    return LogFormat(**values | patterns)


_TABLE = read_toml(__file__, "log_formats.toml")["format"]
FORMATS = tuple(_build_format(row, {row["program"]: row for row in _TABLE}) for row in _TABLE)
