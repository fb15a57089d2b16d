"""Read the acceptance experiments and the expected spreads of their results from the tables next to this module."""

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml

from sweeper.metrics.outliers import Spread
from workloads.api.contract import Scalar

Profile = Literal["quick", "standard", "burn_in"]
Scope = Literal["device", "pair", "node", "link", "whole"]
# The suffixes of derived tests: a sustained run's last fifth over its first, and a rate at all parts' median clock.
END_OVER_START, EQUAL_CLOCK = ", end over start", ", at equal clock"
PRODUCT_OF_RANKS = {"ranks": 1, "4 * ranks": 4}  # values that are multiples of the gang's number of ranks


@dataclass(frozen=True)
class Experiment:
    """One trial of an acceptance run, and the results to take from it: metrics by the names of tests."""

    workload: str
    scope: Scope
    parameters: Mapping[str, Any]
    tests: Mapping[str, str]

    def parameters_for(self, ranks: int) -> dict[str, Scalar]:
        """Return the parameters for a gang with this number of ranks."""
        return {
            name: ranks * PRODUCT_OF_RANKS[value] if value in PRODUCT_OF_RANKS else value
            for name, value in self.parameters.items()
        }


@dataclass(frozen=True)
class Reading:
    """The result of one test on one part of the cluster."""

    test: str
    scope: Scope
    part: str  # a device, a pair, a node, a link between nodes, or the whole
    nodes: tuple[str, ...]  # the part's nodes
    unit: str
    value: float = math.nan  # the rate, NaN if there is none
    low: float = math.nan  # the bounds of its 95% interval, NaN if there is none
    high: float = math.nan
    # device readings during the test: clock, power, temperature, reasons for a lower clock
    beside: Mapping[str, Scalar] = field(default_factory=dict)
    problem: str = ""  # why there is no value; empty if there is one

    @property
    def place(self) -> str:
        return name_place(self.nodes)


def name_place(nodes: Sequence[str]) -> str:
    """Return the name of the part of a cluster that consists of these nodes."""
    return " + ".join(nodes) if len(nodes) <= 2 else f"all {len(nodes)} nodes"


@cache
def read_experiments(kind: str, profile: Profile) -> tuple[Experiment, ...]:
    """Return the experiments for a kind of device, cpu or gpu, in the order in which they run."""
    rows = yaml.safe_load(Path(__file__).with_name("experiments.yaml").read_text())[kind]
    chosen = [
        {name: value[profile] if isinstance(value, dict) else value for name, value in row["parameters"].items()}
        for row in rows
    ]
    return tuple(Experiment(**{**row, "parameters": own}) for row, own in zip(rows, chosen, strict=True))


def spread_of(kind: str, test: str) -> Spread:
    """Return the spread of a test's results, from the table's first row whose text occurs in the test's name."""
    return next(spread for text, spread in _read_spreads(kind) if text in test)


@cache
def _read_spreads(kind: str) -> list[tuple[str, Spread]]:
    rows = csv.DictReader(Path(__file__).with_name("spreads.csv").read_text().splitlines())
    names = ("device", "node", "run", "expected", "worth")
    return [(row["tests"], Spread(*(float(row[name]) for name in names))) for row in rows if row["kind"] == kind]
