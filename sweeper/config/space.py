"""The space of a sweep: each parameter a constant, a choice, a range with steps or an interval.

Written in Hydra's own words, in YAML and on the command line alike:

    k: 4096                           a constant
    dtype: choice(bf16, fp16)         also [bf16, fp16], and on the command line space.dtype=bf16,fp16
    m: range(1024, 20481, 64)         the end is left out, as in Python
    lr: interval(0.001, 0.1)          any number between, both included
    batch: tag(log, range(1, 1025))   drawn evenly on a logarithmic scale

and `{cpu: …, gpu: …}` where a processor needs another than a GPU.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from functools import cached_property
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, QuotedString, RangeSweep
from hydra.errors import HydraException

from sweeper.common.errors import UserInputError

Value = str | int | float | bool | None
Parameters = dict[str, Value]


@dataclass(frozen=True)
class Choice:
    """One of a few values, in no order."""

    values: tuple[Value, ...]

    def __str__(self) -> str:
        return f"choice({', '.join(map(str, self.values))})"

    def __contains__(self, value: object) -> bool:
        return any(value is one or (value == one and type(value) is type(one)) for one in self.values)

    def __len__(self) -> int:
        return len(self.values)

    def points(self) -> Iterator[Value]:
        return iter(self.values)


def stepped(first: int | float, step: int | float, count: int) -> int | float:
    """So many steps after the first, reckoned in decimals as people (and Optuna's bounds) do."""
    if isinstance(first, int) and isinstance(step, int):
        return first + count * step
    return float(Decimal(str(first)) + count * Decimal(str(step)))


@dataclass(frozen=True)
class Range:
    """low, low + step, … up to `high`, which is included."""

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
        """The point at a number that is one but for rounding, as a sampler's sum is: 0.1 + 2 x 0.1 is 0.3 here."""
        return stepped(self.low, self.step, round((value - self.low) / self.step))


@dataclass(frozen=True)
class Interval:
    """Any number from `low` to `high`, both included."""

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
    """What varies and what does not. A point of it is one value for each parameter.

    only: where not all combinations are worth trying, those that are, the most promising first
    """

    dimensions: dict[str, Dimension] = field(default_factory=dict)
    constants: Parameters = field(default_factory=dict)
    only: tuple[Parameters, ...] | None = None

    @cached_property
    def size(self) -> float:
        """How many points there are; infinite where an interval is among them."""
        if self.only is not None:
            return len(self.only)
        return math.prod(math.inf if isinstance(d, Interval) else len(d) for d in self.dimensions.values())

    def __contains__(self, point: Mapping[str, Value]) -> bool:
        """Whether the point is in the space; parameters that it does not name are not looked at."""
        return all(
            value in self.dimensions[name] if name in self.dimensions else self.constants.get(name) == value
            for name, value in point.items()
        )

    def points(self) -> Iterator[Parameters]:
        """Every combination of what varies, the last parameter fastest, or those that are worth trying in their order.

        Raises SaidWrongly for an interval.
        """
        if self.only is not None:
            yield from map(dict, self.only)
            return
        axes = []
        for name, dimension in self.dimensions.items():
            if isinstance(dimension, Interval):
                raise UserInputError(f"space.{name}={dimension}: has no grid; give it a range with a step or a choice")
            axes.append(dimension)
        for values in itertools.product(*(tuple(axis.points()) for axis in axes)):
            yield dict(zip(self.dimensions, values, strict=True))

    def described(self) -> dict[str, Value]:
        """The space as text, one entry a parameter, for identity and provenance."""
        return {**self.constants, **{name: str(dimension) for name, dimension in self.dimensions.items()}}


def point_key(params: Mapping[str, Any]) -> str:
    """Two points are the same if this is."""
    return json.dumps(dict(params), sort_keys=True)


def parse(given: Mapping[str, Any], kind: str) -> Space:
    """The space that a configuration's mapping means on a device of `kind` ("cpu" or "gpu").

    Raises SaidWrongly for one that is empty or cannot be read.
    """
    dimensions: dict[str, Dimension] = {}
    constants: Parameters = {}
    for name, said in given.items():
        read = read_entry(name, for_kind(said, kind, f"space.{name}"))
        if isinstance(read, Choice | Range | Interval):
            dimensions[name] = read
        else:
            constants[name] = read
    return Space(dimensions, constants)


def for_kind(said: Any, kind: str, full: str) -> Any:
    """`{cpu: …, gpu: …}` as the one that applies; anything else as it is."""
    if not isinstance(said, Mapping):
        return said
    if set(said) - {"cpu", "gpu"}:
        raise UserInputError(f"{full}={dict(said)}: a mapping may name cpu and gpu, nothing else")
    if kind not in said:
        raise UserInputError(f"{full}: says nothing for a {kind}")
    return said[kind]


def read_entry(name: str, said: Any) -> Dimension | Value:
    """One entry of a space. A list of choices or a constant is already what it means; a text is parsed."""
    full = f"space.{name}"
    if isinstance(said, list):
        return _choice(full, said)
    if not isinstance(said, str) or not any(mark in said for mark in "(,["):
        return said
    value = parse_text(full, said)
    match value:
        case ChoiceSweep():
            return _choice(full, value.list)
        case list():
            return _choice(full, value)
        case RangeSweep():
            return _range(full, said, value)
        case IntervalSweep():
            return _interval(full, said, value)
    return said


def parse_text(full: str, said: str) -> Any:
    """What Hydra's grammar makes of the text. Raises SaidWrongly where it is none of its words."""
    try:
        return OverridesParser.create().parse_override(f"{full}={said}").value()
    except HydraException as error:
        words = "range(first, end, step), choice(a, b), interval(low, high) or a constant"
        raise UserInputError(f"{full}={said}: cannot be read; it may be {words}") from error


def _choice(full: str, listed: list[Any]) -> Choice | Value:
    values = [value.text if isinstance(value, QuotedString) else value for value in listed]
    if not values:
        raise UserInputError(f"{full}: is an empty choice")
    if any(isinstance(value, (list, dict)) for value in values):
        raise UserInputError(f"{full}={values}: a choice is among single values")
    different = {(type(value), value): value for value in values}  # to Python, 1 is True
    return Choice(tuple(different.values())) if len(different) > 1 else values[0]


def _range(full: str, said: str, sweep: RangeSweep) -> Range | Value:
    first, end, step = sweep.start or 0, sweep.stop, sweep.step
    assert end is not None
    if step <= 0:
        raise UserInputError(f"{full}={said}: the step has to be above 0")
    count = math.ceil((end - first) / step - 1e-9)
    if count < 1:
        raise UserInputError(f"{full}={said}: is empty, it ends before it starts (the end is left out)")
    log = "log" in sweep.tags
    if log and (step != 1 or first < 1):
        raise UserInputError(f"{full}={said}: a logarithmic range has step 1 and starts at 1 or above")
    return Range(first, stepped(first, step, count - 1), step, log) if count > 1 else first


def _interval(full: str, said: str, sweep: IntervalSweep) -> Interval:
    assert sweep.start is not None and sweep.end is not None
    log = "log" in sweep.tags
    if not sweep.start < sweep.end:
        raise UserInputError(f"{full}={said}: is empty, {sweep.start} is not below {sweep.end}")
    if log and sweep.start <= 0:
        raise UserInputError(f"{full}={said}: a logarithmic scale has to start above 0")
    return Interval(float(sweep.start), float(sweep.end), log)
