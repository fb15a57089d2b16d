"""Define each trial metric's unit, label, direction, source and requirements.

A new metric is one row in `metrics.toml`, plus a formula in `sweeper/metrics/derivation.py` for a derived metric.
The rows drive tables, plots, objectives, limits, the checks before a sweep and docs/reference/metrics.md. A workload
may also report metrics that have no row; these are shown under their own names.
"""

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from workloads.tables import read_toml

# Relative differences up to this value do not count between points of a front: rounds of one seed cannot resolve them.
# The default is a thousandth: the last of four digits in tables, or an allocator's step of 2 MiB in 2 GiB.
RESOLUTION = 0.001
SUFFIXES = ("_p10", "_p90", "_ci_low", "_ci_high", "_per_gpu")  # suffixes of spreads and intervals precede `_per_gpu`


class Need(StrEnum):
    """What a metric requires of a sweep."""

    GPU = "a GPU"
    ENERGY = "a GPU whose energy is known"
    PEAK = "the device's dense peak"
    BANDWIDTH = "the device's memory bandwidth"
    CEILING = "a measured matmul rate"
    RANKS = "several ranks"
    PRICE = "a price"


@dataclass(frozen=True)
class Metric:
    name: str
    # The unit of the displayed value; empty if there is none, and for fractions displayed as fractions.
    unit: str = ""
    label: str = ""  # the column heading; if empty, tables show the metric only as an objective, under its name
    # "maximize" or "minimize"; empty if neither is better, as for a clock or a dimension.
    direction: str = ""
    factor: float = 1.0  # multiplies the stored value to give the displayed value
    resolution: float = RESOLUTION  # relative differences up to this value do not count on a front
    source: str = ""  # the part of a measurement that gives the metric; empty if the workload reports the metric
    needs: Need | None = None
    unranked: str = ""  # why the metric cannot be an objective or a limit; empty if it can be one
    # The metric's position among the metrics that rank results; a trial's first metric in this order counts. Else 0.
    speed: int = 0
    is_rate: bool = False  # proportional to the speed, for equal work

    @property
    def heading(self) -> str:
        """The column heading: the label with the unit, or the name, which contains the unit."""
        return f"{self.label} {self.unit}".strip() if self.label else self.name


COST = "cost_per_million_tokens"

METRICS = {
    name: Metric(name, **row | {"needs": Need[row["needs"]] if "needs" in row else None})
    for name, row in read_toml(__file__, "metrics.toml").items()
}
ROWS = tuple(METRICS.values())
ENDINGS: dict[str, str] = read_toml(__file__, "endings.toml")


_PARTS = re.compile(r"\b\w+_per_step\b|\benergy\b|\b(?:baseline|sustained)_step_times_s\b")
_MEMORY_UNITS = ("GiB", "MiB", "GB", "MB")
# Names of a user's metrics that have no unit.
_MEMORY = re.compile("mem(ory)?(_|$)|vram", re.IGNORECASE)
_RATE = re.compile(
    "throughput|bandwidth|speed|per_s|latency|time|flops|fps|iops|gbps|(^|_)([wqrit]ps|tgs|ttft)(_|$)", re.IGNORECASE
)
GPU_READINGS = ("power_w", "temperature_c")  # which every workload has on a GPU


def find_ending(name: str) -> str:
    """Return the unit that a name's ending stands for, or an empty string."""
    return next((unit for end, unit in ENDINGS.items() if name.endswith(end)), "")


def get_metric(name: str) -> Metric:
    return METRICS.get(name) or Metric(name, find_ending(name))


def choose_summary(name: str) -> Literal["last", "median", "highest"]:
    """Return how a program's metric follows from its steps: memory is the highest, a rate or time the median, and a
    metric without a unit, such as a loss or an accuracy, is that of the last step."""
    unit = get_metric(name).unit
    if name.startswith("peak_") or unit in _MEMORY_UNITS or (name not in METRICS and _MEMORY.search(name)):
        return "highest"
    return "median" if name != "loss" and (name in METRICS or unit or _RATE.search(name)) else "last"


def base_name(name: str) -> str:
    """Return the name of the metric of which this is a spread, a bound of an interval, or the value per GPU."""
    for suffix in SUFFIXES:
        name = name.removesuffix(suffix)
    return name


def find_source(name: str) -> str:
    """Return the source of a derived metric, or of its spread or interval; empty for other metrics."""
    return get_metric(base_name(name)).source


def find_missing(name: str, measures: str) -> list[str]:
    """Return what this metric needs of a measurement beyond step times and `Workload.measures`."""
    if name in GPU_READINGS:
        return []
    source = find_source(name)
    needed = _PARTS.findall(source) if source else [name]
    return [part for part in needed if part not in measures.split()]
