"""The search space of a sweep: each parameter is a constant, a choice, a range with a step, or an interval.

YAML files and the command line use Hydra's syntax:

    k: 4096                           a constant
    dtype: choice(bf16, fp16)         also [bf16, fp16], and on the command line space.dtype=bf16,fp16
    m: range(1024, 20481, 64)         the end is exclusive, as in Python
    lr: interval(0.001, 0.1)          any number in between, both ends inclusive
    batch: tag(log, range(1, 1025))   sampled on a logarithmic scale

`{cpu: …, gpu: …}` gives different entries for a CPU and a GPU. `env: {NAME: …}` lists environment variables, which
become parameters named `env.NAME` (`environment.py`).
"""

import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from functools import cached_property
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, Quote, QuotedString, RangeSweep
from hydra.errors import HydraException

from sweeper.common.format import shorten
from sweeper.config.environment import flatten
from workloads.api.errors import UserInputError
from workloads.api.validation import MAX_INTEGER

Value = str | int | float | bool | None
Parameters = dict[str, Value]
LISTS = "(,["  # unquoted text with one of these characters is parsed as a list, a choice or a range
_PLAIN_TEXT = re.compile(r"(?!\.+\d)[A-Za-z_./][\w./:-]*", re.ASCII)  # needs no quotes, unless it is a literal
NULL_CHOICE = re.compile(r"^choice\((.*\bnull\b.*)\)$")  # Hydra's choice() rejects null, but a list may contain it
ALLOWED_FORMS = (
    "range(first, end, step), choice(a, b), interval(low, high), for a log scale tag(log, interval(low, high)), "
    "divisors(gpus), multiple(gpus, 64), or a constant"
)
BY_GPUS = re.compile(r"divisors\(gpus\)|multiple\(gpus, *([1-9]\d*)\)")  # see `sweeper.config.device_values`


@dataclass(frozen=True)
class Choice:
    """One of several unordered values."""

    values: tuple[Value, ...]

    def __str__(self) -> str:
        return f"choice({', '.join(map(str, self.values))})"

    def __contains__(self, value: object) -> bool:
        return any(value is option or (value == option and type(value) is type(option)) for option in self.values)

    def __len__(self) -> int:
        return len(self.values)

    def points(self) -> Iterator[Value]:
        return iter(self.values)


def stepped(first: int | float, step: int | float, count: int) -> int | float:
    """Return `first + count * step` in decimal arithmetic, as Optuna computes bounds: 0.1 + 2 * 0.1 gives 0.3."""
    if isinstance(first, int) and isinstance(step, int):
        return first + count * step
    return float(Decimal(str(first)) + count * Decimal(str(step)))


@dataclass(frozen=True)
class Range:
    """The values low, low + step, and so on, up to and including `high`."""

    low: int | float
    high: int | float
    step: int | float
    log: bool = False

    def __str__(self) -> str:
        end = self.high + 1 if isinstance(self.step, int) else stepped(self.low, self.step, len(self))
        text = f"range({self.low}, {end}, {self.step})"
        return f"tag(log, {text})" if self.log else text

    def __contains__(self, value: object) -> bool:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return False
        steps = (value - self.low) / self.step
        return abs(steps - round(steps)) < 1e-9 and 0 <= round(steps) < len(self)

    def __len__(self) -> int:
        return round((self.high - self.low) / self.step) + 1

    def points(self) -> Iterator[Value]:
        return (stepped(self.low, self.step, i) for i in range(len(self)))

    def nearest(self, value: int | float) -> int | float:
        """Return the allowed value nearest to a number with rounding error, such as a sampler's sum of steps."""
        return stepped(self.low, self.step, round((value - self.low) / self.step))


@dataclass(frozen=True)
class Interval:
    """Any number from `low` to `high`, both inclusive."""

    low: float
    high: float
    log: bool = False

    def __str__(self) -> str:
        text = f"interval({self.low}, {self.high})"
        return f"tag(log, {text})" if self.log else text

    def __contains__(self, value: object) -> bool:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and self.low <= value <= self.high


Dimension = Choice | Range | Interval


@dataclass(frozen=True)
class Space:
    """The search space: dimensions that vary, and constants. A point has a value for each parameter."""

    dimensions: dict[str, Dimension] = field(default_factory=dict)
    constants: Parameters = field(default_factory=dict)
    only: tuple[Parameters, ...] | None = None  # the points to try, most promising first; None means all combinations

    @cached_property
    def size(self) -> float:
        """The number of points, which is infinite if a dimension is an interval."""
        if self.only is not None:
            return len(self.only)
        return math.prod(math.inf if isinstance(d, Interval) else len(d) for d in self.dimensions.values())

    def __contains__(self, point: Mapping[str, Value]) -> bool:
        """Return whether the space contains each of the point's values."""
        return all(
            value in self.dimensions[name] if name in self.dimensions else self.constants.get(name) == value
            for name, value in point.items()
        )

    def points(self) -> Iterator[Parameters]:
        """Yield the points in `only` if given, otherwise all (the last parameter varies fastest). Raises UserInputError
        if a dimension is an interval."""
        if self.only is not None:
            yield from map(dict, self.only)
            return
        axes = []
        for name, dimension in self.dimensions.items():
            if isinstance(dimension, Interval):
                raise UserInputError(f"space.{name}={dimension}: has no grid; use a range with a step or a choice")
            axes.append(tuple(dimension.points()))
        for values in itertools.product(*axes):
            yield dict(zip(self.dimensions, values, strict=True))

    def described(self) -> dict[str, Value]:
        """Return the space with one entry per parameter and dimensions as strings, for identity and provenance."""
        return {**self.constants, **{name: str(dimension) for name, dimension in self.dimensions.items()}}


def point_key(params: Mapping[str, Any]) -> str:
    """Return a string that is equal for equal points."""
    return json.dumps(dict(params), sort_keys=True)


def parse(entries: Mapping[str, Any], kind: str) -> Space:
    """Parse the configured space for a device of `kind` ("cpu" or "gpu"). Raises UserInputError."""
    dimensions: dict[str, Dimension] = {}
    constants: Parameters = {}
    for name, entry in flatten(entries).items():
        value = parse_entry(name, select_kind(entry, kind, f"space.{name}"))
        if isinstance(value, Choice | Range | Interval):
            dimensions[name] = value
        else:
            constants[name] = value
    return Space(dimensions, constants)


def select_kind(entry: Any, kind: str, key: str) -> Any:
    """Select this device kind's value from `{cpu: …, gpu: …}`. Any other entry is returned unchanged."""
    if not isinstance(entry, Mapping):
        return entry
    if set(entry) - {"cpu", "gpu"}:
        raise UserInputError(f"{key}={dict(entry)}: a mapping may have the keys cpu and gpu only")
    if kind not in entry:
        raise UserInputError(f"{key}: has no value for a {kind}")
    return entry[kind]


def parse_entry(name: str, entry: Any) -> Dimension | Value:
    """Parse one entry of a space: a list is a choice, a string is parsed, and other values are constants."""
    key = f"space.{name}"
    if isinstance(entry, list):
        return _choice(key, entry)
    if not isinstance(entry, str) or not any(mark in entry for mark in "(,["):
        return entry
    value = parse_text(key, entry)
    if isinstance(value, RangeSweep | IntervalSweep):
        return _numbers(key, entry, value)
    if isinstance(value, ChoiceSweep | list):
        return _choice(key, value.list if isinstance(value, ChoiceSweep) else value)
    return value if isinstance(value, str) else entry  # the text was in quotes


def parse_text(key: str, text: str) -> Any:
    """Parse the text with Hydra's grammar. Raises UserInputError if it cannot be parsed."""
    listed = NULL_CHOICE.sub(r"[\1]", text)
    try:
        return OverridesParser.create().parse_override(f"{key}={listed}").value()
    except HydraException as error:
        quotes = "; within {} in a file it needs quotes" if "(" in text and ")" not in text else ""
        raise UserInputError(f"{key}={text}: cannot be parsed. Allowed: {ALLOWED_FORMS}{quotes}") from error


def write_value(value: Value) -> str:
    """Write a value in Hydra's override syntax."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if not isinstance(value, str):
        return repr(value)
    if _PLAIN_TEXT.fullmatch(value) and value.lower() not in ("true", "false", "null", "nan", "inf"):
        return value
    return QuotedString(escape_references(value), Quote.double).with_quotes()


def escape_references(text: str) -> str:
    """Escape ${…}, which OmegaConf would treat as a reference."""
    return re.sub(r"(\\*)\$\{", lambda found: f"{found[1] * 2}\\${{", text)


def _choice(key: str, values: list[Any]) -> Choice | Value:
    options = [value.text if isinstance(value, QuotedString) else value for value in values]
    if not options:
        raise UserInputError(f"{key}: empty choice")
    if any(isinstance(option, (list, dict)) for option in options):
        raise UserInputError(f"{key}={options}: a choice has single values only")
    distinct = {(type(option), option): option for option in options}  # in Python, 1 == True
    return Choice(tuple(distinct.values())) if len(distinct) > 1 else options[0]


def _numbers(key: str, text: str, sweep: RangeSweep | IntervalSweep) -> Dimension | Value:
    """Return a range or an interval after checking that its numbers fit into 64 bits, as Optuna and NumPy require."""
    first, end = sweep.start or 0, sweep.end if isinstance(sweep, IntervalSweep) else sweep.stop
    step = sweep.step if isinstance(sweep, RangeSweep) else 1
    log = "log" in sweep.tags
    assert end is not None
    if not all(abs(number) < MAX_INTEGER for number in (first, end, step)):  # also rejects infinity and NaN
        raise UserInputError(f"{key}={shorten(text, 80)}: its numbers must be between -2^63 and 2^63")
    if isinstance(sweep, IntervalSweep):
        if not first < end:
            raise UserInputError(f"{key}={text}: empty interval; {sweep.start} is not below {end}")
        if log and first <= 0:
            raise UserInputError(f"{key}={text}: a logarithmic interval must start above 0")
        return Interval(float(first), float(end), log)
    if step <= 0:
        raise UserInputError(f"{key}={text}: the step must be positive")
    count = math.ceil((end - first) / step - 1e-9)
    if count < 1:
        raise UserInputError(f"{key}={text}: empty range; the end is exclusive")
    if log and (step != 1 or first < 1):
        raise UserInputError(f"{key}={text}: a logarithmic range has step 1 and starts at 1 or above")
    return Range(first, stepped(first, step, count - 1), step, log) if count > 1 else first
