"""List a layout space's points with estimates; all points that break one rule share an entry. Does not import torch."""

import heapq
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from workloads.api.contract import Candidate, Estimate, Machine, Scalar, Workload
from workloads.layouts.layout import DEGREES
from workloads.layouts.rules import RULES, rules_of
from workloads.layouts.trainers import OWN
from workloads.tables import read_toml

Values = Mapping[str, Sequence[Scalar]]


Level = tuple[list[str], list[str]]  # parameters, and the names of rules

_ROWS = read_toml(__file__, "levels.toml")["level"]
LEVELS: tuple[Level, ...] = tuple((row["parameters"], row["rules"]) for row in _ROWS)
WORLD_SIZE_RULE = RULES[0].name
# Parameters that trade time for memory, each with the value that is fastest in every layout.
FASTEST: dict[str, Scalar] = {"checkpointing": "none", "reshard_after_forward": False}
LISTED = 5_000  # layouts; a layout is omitted if at least this many others are faster
SLOWER_RULE = f"the layout is among the {LISTED:,} fastest"


class Listing:
    """The points of one space, in the order of its dimensions.

    Attributes:
        best: tokens/s of the fastest layouts so far, as a heap with the slowest first.
    """

    def __init__(
        self, workload: Workload, dimensions: Values, constants: Mapping[str, Scalar], machine: Machine
    ) -> None:
        self._workload, self._dimensions, self._constants, self._machine = workload, dimensions, constants, machine
        self.best: list[float] = []

    def candidates(self) -> Iterator[Candidate]:
        """Yield every point with its estimate. All points that break the same rule in `LEVELS` form one candidate."""
        degrees = {name: values for name, values in self._dimensions.items() if name in DEGREES}
        total = math.prod(map(len, self._dimensions.values()))
        remaining = total // math.prod(map(len, degrees.values()))
        fixed = math.prod(int(self._constants.get(name) or 1) for name in DEGREES if name not in degrees)
        listed = 0
        for values in product(*degrees.values()):
            if fixed * math.prod(int(value or 1) for value in values) == self._machine.world_size:
                listed += remaining
                yield from self._list_levels(dict(zip(degrees, values, strict=True)), LEVELS)
        if listed < total:
            reason = f"{', '.join(DEGREES)} do not multiply to {self._machine.world_size} ranks"
            yield Candidate({}, Estimate(reason, WORLD_SIZE_RULE), total - listed)

    def _list_levels(self, chosen: dict[str, Scalar], levels: Sequence[Level]) -> Iterator[Candidate]:
        machine = self._machine
        if levels:
            (names, rules), *lower = levels
            checked = [rule for rule in rules_of(OWN) if rule.name in rules]
            for point in self._choose(chosen, lambda name: name in names):
                parameters = self._parameters(point)
                if broken := parameters.find_violation(machine, checked):
                    estimate = Estimate(broken.reason, broken.rule, description=str(parameters.layout))
                    yield self._exclude(point, estimate)
                else:
                    yield from self._list_levels(point, lower)
            return
        for point in self._choose(chosen, lambda name: name not in FASTEST):
            if len(self.best) == LISTED:  # is the layout slower than all of them, whatever memory it takes?
                fastest = self._parameters({**self._constants, **point, **FASTEST})
                if fastest.estimate_speed(machine)["tokens_per_s"] < self.best[0]:
                    reason = f"slower than {LISTED:,} other layouts, which have {self.best[0]:,.0f} tokens/s or more"
                    yield self._exclude(point, Estimate(reason, SLOWER_RULE))
                    continue
            for variant in self._choose(point, lambda name: True):
                estimate = self._workload.estimate(self._parameters(variant), machine)
                if not estimate.unsupported_reason:
                    push = heapq.heappush if len(self.best) < LISTED else heapq.heappushpop
                    push(self.best, estimate.metrics["tokens_per_s"])
                yield Candidate(variant, estimate)

    def _choose(self, chosen: dict[str, Scalar], is_chosen: Callable[[str], bool]) -> Iterator[dict[str, Scalar]]:
        names = [name for name in self._dimensions if name not in chosen and is_chosen(name)]
        for values in product(*(self._dimensions[name] for name in names)):
            yield chosen | dict(zip(names, values, strict=True))

    def _exclude(self, point: dict[str, Scalar], estimate: Estimate) -> Candidate:
        count = math.prod(len(values) for name, values in self._dimensions.items() if name not in point)
        return Candidate(point, estimate, count)

    def _parameters(self, point: Mapping[str, Scalar]) -> Any:
        return self._workload.Parameters(**{**self._constants, **point})
