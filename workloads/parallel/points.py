"""The points of a space of layouts with their estimates; many points that break one rule are one entry. No torch."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from workloads.api.contract import Candidate, Estimate, Machine, Scalar, Workload
from workloads.layouts.layout import DEGREES
from workloads.layouts.rules import RULES, rules_of
from workloads.layouts.trainers import OWN

Values = Mapping[str, Sequence[Scalar]]


@dataclass(frozen=True)
class Level:
    """Parameters that are chosen together, and the rules that depend on these and those chosen before."""

    parameters: tuple[str, ...]
    rules: tuple[str, ...]


# In the order of `RULES`, so that a point counts for the rule that it would break first by itself.
LEVELS = (
    Level(
        ("model", "sequence_length", "tp_across_nodes", "cp_method"),
        ("tp divides heads, sizes and sequence", "tp stays within a node", "cp divides the sequence"),
    ),
    Level(("global_batch", "micro_batch"), ("micro-batches divide the global batch",)),
    Level(("stages_per_rank", "schedule"), ("stages and schedule agree", "micro-batches fill the pipeline")),
)
WORLD_SIZE_RULE = RULES[0].name
# What trades time for memory, with the fastest value: no other value of these makes a layout faster.
FASTEST: dict[str, Scalar] = {"checkpointing": "none", "reshard_after_forward": False}
LISTED = 5_000  # layouts; of more, those that are slower than so many others are left out
SLOWER_RULE = f"the layout is among the {LISTED:,} fastest"


class Listing:
    """The points of one space, in the order of its dimensions.

    Attributes:
        best: tokens/s of the fastest layouts so far, a heap with the slowest of them first.
    """

    def __init__(
        self, workload: Workload, dimensions: Values, constants: Mapping[str, Scalar], machine: Machine
    ) -> None:
        self._workload, self._dimensions, self._constants, self._machine = workload, dimensions, constants, machine
        self.best: list[float] = []

    def candidates(self) -> Iterator[Candidate]:
        """Yield every point with its estimate, and points that break one rule of `LEVELS` as one candidate."""
        degrees = {name: values for name, values in self._dimensions.items() if name in DEGREES}
        total = math.prod(map(len, self._dimensions.values()))
        remaining = total // math.prod(map(len, degrees.values()))
        fixed = math.prod(int(self._constants.get(name) or 1) for name in DEGREES if name not in degrees)
        listed = 0
        for chosen in _list_degrees(degrees, self._machine.world_size, fixed):
            listed += remaining
            yield from self._list_levels(chosen, LEVELS)
        if listed < total:
            reason = f"{', '.join(DEGREES)} do not multiply to {self._machine.world_size} ranks"
            yield Candidate({}, Estimate(reason, WORLD_SIZE_RULE), total - listed)

    def _list_levels(self, chosen: dict[str, Scalar], levels: Sequence[Level]) -> Iterator[Candidate]:
        """Yield the points that have the chosen values."""
        if levels:
            for point in self._choose(chosen, lambda name: name in levels[0].parameters):
                if broken := self._broken_rule(point, levels[0].rules):
                    yield self._exclude(point, broken)
                else:
                    yield from self._list_levels(point, levels[1:])
            return
        for point in self._choose(chosen, lambda name: name not in FASTEST):
            if self._is_slow(point):
                reason = f"slower than {LISTED:,} other layouts, which have {self.best[0]:,.0f} tokens/s or more"
                yield self._exclude(point, Estimate(reason, SLOWER_RULE))
                continue
            for variant in self._choose(point, lambda name: True):
                estimate = self._workload.estimate(self._parameters(variant), self._machine)
                if not estimate.unsupported_reason:
                    push = heapq.heappush if len(self.best) < LISTED else heapq.heappushpop
                    push(self.best, estimate.metrics["tokens_per_s"])
                yield Candidate(variant, estimate)

    def _choose(self, chosen: dict[str, Scalar], is_chosen: Callable[[str], bool]) -> Iterator[dict[str, Scalar]]:
        """Yield the chosen values with every combination of those dimensions that are chosen next."""
        names = [name for name in self._dimensions if name not in chosen and is_chosen(name)]
        for values in product(*(self._dimensions[name] for name in names)):
            yield chosen | dict(zip(names, values, strict=True))

    def _exclude(self, point: dict[str, Scalar], estimate: Estimate) -> Candidate:
        """Return all points that have these values as one candidate."""
        count = math.prod(len(values) for name, values in self._dimensions.items() if name not in point)
        return Candidate(point, estimate, count)

    def _is_slow(self, point: dict[str, Scalar]) -> bool:
        """Return whether the layout is slower than `LISTED` others, however much memory it takes."""
        if len(self.best) < LISTED:
            return False
        parameters = self._parameters({**self._constants, **point, **FASTEST})
        return bool(parameters.estimate_speed(self._machine)["tokens_per_s"] < self.best[0])

    def _broken_rule(self, point: dict[str, Scalar], rules: Sequence[str]) -> Estimate | None:
        parameters, machine = self._parameters(point), self._machine
        checked = [rule for rule in rules_of(OWN) if rule.name in rules]
        on_gpu = machine.kind == "gpu"
        broken = parameters.find_violation(machine.world_size, machine.ranks_per_node, on_gpu=on_gpu, rules=checked)
        return broken and Estimate(broken.reason, broken.rule, description=str(parameters.layout))

    def _parameters(self, point: Mapping[str, Scalar]) -> Any:
        return self._workload.Parameters(**{**self._constants, **point})


def _list_degrees(degrees: Values, ranks: int, product_so_far: int) -> Iterator[dict[str, Scalar]]:
    """Yield the values of the degrees that multiply to the number of ranks."""
    if not degrees:
        if product_so_far == ranks:
            yield {}
        return
    name, *others = degrees
    rest = {other: degrees[other] for other in others}
    for value in degrees[name]:
        if ranks % (product_so_far * int(value or 1)) == 0:
            for chosen in _list_degrees(rest, ranks, product_so_far * int(value or 1)):
                yield {name: value, **chosen}
