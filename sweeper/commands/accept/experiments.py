"""Read the acceptance experiments from experiments.yaml and the expected spread of each result from spreads.csv."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml

from sweeper.metrics.outliers import Spread
from workloads.api.contract import Scalar
from workloads.tables import read_csv

Profile = Literal["quick", "standard", "burn_in"]
Scope = Literal["device", "pair", "node", "link", "whole"]
# Suffixes of derived tests: a sustained run's last fifth relative to its first, and a rate scaled to the median clock.
END_OVER_START, EQUAL_CLOCK = ", end over start", ", at equal clock"
PRODUCT_OF_RANKS = {"ranks": 1, "4 * ranks": 4}  # parameter values that stand for a multiple of the gang's rank count


@dataclass(frozen=True)
class Experiment:
    """One trial of an acceptance run. `tests` maps each test's name to the metric that is its result."""

    workload: str
    scope: Scope
    parameters: Mapping[str, Any]
    tests: Mapping[str, str]

    def parameters_for(self, ranks: int) -> dict[str, Scalar]:
        """Return the parameters for a gang of `ranks` ranks, with values such as "4 * ranks" evaluated."""
        return {
            name: ranks * PRODUCT_OF_RANKS[value] if value in PRODUCT_OF_RANKS else value
            for name, value in self.parameters.items()
        }


@dataclass(frozen=True)
class Reading:
    """The result of one test on one part of the cluster."""

    test: str
    scope: Scope
    part: str  # a device, a pair of GPUs, a node, a link between two nodes, or the whole cluster
    nodes: tuple[str, ...]  # the part's nodes
    unit: str
    value: float = math.nan  # the rate, NaN if there is none
    low: float = math.nan  # the bounds of the rate's 95% interval, NaN if it has none
    high: float = math.nan
    # device readings taken during the test: clock, power, temperature, and reasons for throttling
    beside: Mapping[str, Scalar] = field(default_factory=dict)
    problem: str = ""  # why there is no value; empty if there is a value

    @property
    def place(self) -> str:
        return name_place(self.nodes)


def name_place(nodes: Sequence[str]) -> str:
    return " + ".join(nodes) if len(nodes) <= 2 else f"all {len(nodes)} nodes"


@cache
def read_experiments(kind: str, profile: Profile) -> tuple[Experiment, ...]:
    """Return the experiments for a device kind (cpu or gpu) in execution order."""
    rows = yaml.safe_load(Path(__file__).with_name("experiments.yaml").read_text())[kind]
    chosen = [
        {name: value[profile] if isinstance(value, dict) else value for name, value in row["parameters"].items()}
        for row in rows
    ]
    return tuple(Experiment(**{**row, "parameters": own}) for row, own in zip(rows, chosen, strict=True))


@cache
def spread_of(kind: str, test: str) -> Spread:
    """Return the spread of a test's results: the first row of spreads.csv whose text is part of the test's name."""
    row = next(row for row in read_csv(__file__, "spreads.csv") if row["kind"] == kind and row["tests"] in test)
    return Spread(*(float(row[name]) for name in ("device", "node", "run", "expected", "worth")))
