"""Every metric of a trial: its unit, label and direction, what it is derived from, and what it needs.

A new metric is one row of `metrics.toml`, and its formula in `sweeper/metrics/derivation.py` where it is derived. The
rows are read by tables, plots, objectives and limits, the checks before a sweep and docs/reference/metrics.md. A
workload may report metrics that have no row: they are shown under their names.
"""

import tomllib
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

# The largest relative difference that does not count between points of a front: rounds of one seed cannot show it.
# By default a thousandth: the last of the four digits that tables show, and 2 MiB, the step of an allocator, of 2 GiB.
RESOLUTION = 0.001
SUFFIXES = ("_p10", "_p90", "_ci_low", "_ci_high", "_per_gpu")  # of spread and interval before `_per_gpu`


class Need(StrEnum):
    """What a sweep needs to have a metric."""

    GPU = "a GPU"
    ENERGY = "a GPU whose energy is known"
    PEAK = "the device's dense peak"
    BANDWIDTH = "the device's memory bandwidth"
    CEILING = "a measured matmul rate"
    RANKS = "several ranks"
    PRICE = "a price"


@dataclass(frozen=True)
class Metric:
    """A metric of a trial."""

    name: str
    # of the displayed value; empty for a number without one and for fractions that are displayed as such
    unit: str = ""
    label: str = ""  # the head of its column; empty: tables show it only as an objective, under its name
    # how it is better, maximize or minimize; empty: neither is better, as of a clock or a dimension
    direction: str = ""
    factor: float = 1.0  # from the stored value to the displayed one
    resolution: float = RESOLUTION  # the largest relative difference between two points of a front that does not count
    source: str = ""  # what of a measurement it is derived from; empty: the workload reports it
    needs: Need | None = None
    # its place among the metrics that results are ranked by, the first that a trial has; 0: not one of them
    speed: int = 0
    is_rate: bool = False  # at equal work it is proportional to the speed

    @property
    def heading(self) -> str:
        """The head of its column: the label with the unit, else the name, which has the unit in it."""
        return f"{self.label} {self.unit}".strip() if self.label else self.name


COST = "cost_per_million_tokens"

METRICS = {
    name: Metric(name, **row | {"needs": Need[row["needs"]] if "needs" in row else None})
    for name, row in tomllib.loads(Path(__file__).with_name("metrics.toml").read_text()).items()
}
ROWS = tuple(METRICS.values())
# Units of other metrics, such as a function's objective, by the ends of their names.
ENDINGS = {
    "_per_s": "/s",
    "_gb_s": "GB/s",
    "_ms": "ms",
    "_us": "µs",
    "_s": "s",
    "_mib": "MiB",
    "_gib": "GiB",
    "_w": "W",
}


def get_metric(name: str) -> Metric:
    unit = next((unit for end, unit in ENDINGS.items() if name.endswith(end)), "")
    return METRICS.get(name) or Metric(name, unit)


def find_source(name: str) -> str:
    """Return what a derived metric is computed from, also its spread and interval; empty for any other metric."""
    for suffix in SUFFIXES:
        name = name.removesuffix(suffix)
    return get_metric(name).source
