"""What a workload foresees of a space on paper: which points to try, in which order, and why not the others."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from rich.table import Table

from sweeper.common.errors import UserInputError
from sweeper.common.metrics import LINEAR_BANDS
from sweeper.config.hardware import Target
from sweeper.config.resolution import Config, workload_of
from sweeper.config.space import Interval, Parameters, Space, point_key
from sweeper.ui.tables import csv_of, draw, said
from workloads.api import host
from workloads.api.contract import Estimate, Machine

MOST_POINTS = 300_000
SHARE_OF_PEAK = 0.7  # of the vendor's dense peak, where no product was measured
MEMORY_LEFT = 0.97  # of a device's memory, to a process


@dataclass(frozen=True)
class Candidate:
    """One point, and what is foreseen of it."""

    point: Parameters
    estimate: Estimate


@dataclass(frozen=True)
class CostEstimates:
    """All points of a space, those that may be tried and those that may not, the most promising first."""

    objective: str
    machine: Machine
    legal: list[Candidate]
    excluded: list[Candidate]

    @cached_property
    def _figures(self) -> dict[str, float]:
        metrics = ((point_key(seen.point), seen.estimate.metrics.get(self.objective)) for seen in self.legal)
        return {key: figure for key, figure in metrics if figure is not None}

    def figures_of(self, point: Parameters) -> dict[str, float]:
        """What should be measured there, under a metric's name."""
        figure = self._figures.get(point_key(point))
        return {} if figure is None else {f"predicted_{self.objective}": figure}


def look(config: Config, space: Space, machine: Machine) -> CostEstimates | None:
    """None for a workload that foresees nothing. Raises SaidWrongly where no point is worth trying."""
    workload = workload_of(config)
    if not workload.has_estimates:
        return None
    if intervals := [name for name, dimension in space.dimensions.items() if isinstance(dimension, Interval)]:
        raise UserInputError(f"space.{intervals[0]}: every point is looked at before; give it a range or a choice")
    if space.size > MOST_POINTS:
        raise UserInputError(
            f"space: has {space.size:,.0f} points, at most {MOST_POINTS:,} are looked at; fix some of them"
        )
    seen = [
        Candidate(point, workload.estimate(workload.Parameters(**space.constants, **point), machine))
        for point in space.points()
    ]
    sign = -1.0 if config.workload.direction == "maximize" else 1.0
    objective = config.workload.objective
    seen.sort(key=lambda each: sign * each.estimate.metrics.get(objective, sign * math.inf))
    legal = [each for each in seen if not each.estimate.unsupported_reason]
    excluded = [each for each in seen if each.estimate.unsupported_reason]
    if legal and objective not in legal[0].estimate.metrics:
        known = ", ".join(legal[0].estimate.metrics)
        raise UserInputError(f"workload.objective={objective}: {config.workload.name} foresees {known}")
    if not legal:
        raise UserInputError(_why_none(excluded))
    return CostEstimates(objective, machine, legal, excluded)


def _why_none(excluded: Sequence[Candidate]) -> str:
    """Why nothing can be tried: what the nearest to it lacks, else what most lack."""
    if len(excluded) == 1:
        return f"{excluded[0].estimate.description}: {excluded[0].estimate.unsupported_reason}"
    if needing := [seen.estimate for seen in excluded if "memory_gib" in seen.estimate.metrics]:
        least = min(needing, key=lambda each: each.metrics["memory_gib"])
        return f"no point of the space fits; at best ({least.description}) it {least.unsupported_reason}"
    rules = Counter(seen.estimate.rule for seen in excluded).most_common()
    example = next(seen.estimate.unsupported_reason for seen in excluded if seen.estimate.rule == rules[0][0])
    broken = ", ".join(f"{count:,} break “{rule}”" for rule, count in rules[:3])
    return f"no point of the space is legal: {broken}; such as {example}"


def build_machine(target: Target, world_size: int, network_gb_s: float, reached_tflops: dict[str, float]) -> Machine:
    """What is known of the devices that a trial of `world_size` ranks runs on."""
    hardware, gpu = target.hardware, target.hardware.kind == "gpu"
    best_results = {dtype: SHARE_OF_PEAK * peak for dtype, peak in hardware.dense_peak_tflops.items()}
    ranks_per_node = min(world_size, max(node.gpus if gpu else node.cpus for node in target.nodes))
    if gpu:
        memory_gib = MEMORY_LEFT * hardware.memory_gb * 1e9 / 2**30 if hardware.memory_gb else None
    else:  # ranks on one processor share it
        memory_gib = MEMORY_LEFT * (target.least_memory_gib() or host.memory_bytes() / 2**30) / ranks_per_node
    known = {"link_gb_s": hardware.link_gb_s} if hardware.link_gb_s else {}
    return Machine(
        kind=hardware.kind,
        architecture=target.architecture or "",
        world_size=world_size,
        ranks_per_node=ranks_per_node,
        memory_gib=memory_gib,
        matrix_tflops=best_results | reached_tflops,
        network_gb_s=network_gb_s,
        memory_gb_s=1e3 * hardware.bandwidth_tb_s if hardware.bandwidth_tb_s else None,
        **known,
    )


# ── what is said of it ──


def tell(foresight: CostEstimates, width: int, shown: int = 20) -> list[str | Table]:
    """What may be tried, and how many points may not for which reason."""
    objective = foresight.objective
    units = {objective: f"{objective} foreseen", "memory_gib": "GiB"}
    known = [name for name in units if any(name in seen.estimate.metrics for seen in foresight.legal)]
    rows = []
    for n, seen in enumerate(foresight.legal[:shown]):
        metrics = [said(seen.estimate.metrics.get(name, math.nan)) for name in known]
        rows.append([str(n + 1), *metrics, seen.estimate.description])
    parts: list[str | Table] = [f"{_points(len(foresight.legal))} may be tried, the most promising first:"]
    parts.append(draw(["#", *(units[name] for name in known), "point"], rows, len(known) + 2, width))
    if foresight.excluded:
        broken = Counter(seen.estimate.rule for seen in foresight.excluded)
        examples = {seen.estimate.rule: seen.estimate.unsupported_reason for seen in reversed(foresight.excluded)}
        rows = [[f"{count:,}", rule, examples[rule]] for rule, count in broken.most_common()]
        parts.append(f"{_points(len(foresight.excluded))} left out:")
        parts.append(draw(["points", "rule that is broken", "such as"], rows, 3, width))
    return parts


def csv(foresight: CostEstimates) -> str:
    """Every point, with what is foreseen of it or what speaks against it."""
    every = [*foresight.legal, *foresight.excluded]
    rows = [
        {
            **seen.point,
            "said": seen.estimate.description,
            **seen.estimate.metrics,
            "unsupported_reason": seen.estimate.unsupported_reason,
        }
        for seen in every
    ]
    return csv_of(rows)


def _points(count: int) -> str:
    return f"{count:,} point{'' if count == 1 else 's'}"


@dataclass(frozen=True)
class Projection:
    """A point on more and more devices, as it is foreseen: the objective by the number of devices, the fewest first."""

    said: str
    by_devices: dict[int, float]
    assumed: str

    @property
    def of_linear(self) -> list[float]:
        """Of each number, the share of what as many times the fewest would give."""
        (fewest, alone), *_ = self.by_devices.items()
        return [figure / (alone / fewest * devices) for devices, figure in self.by_devices.items()]


def project(
    config: Config, space: Space, foresight: CostEstimates, point: Parameters, nodes: Sequence[int]
) -> Projection | None:
    """The point on so many times the machine's devices; None for a workload that does not say how it would grow."""
    workload, machine = workload_of(config), foresight.machine
    if not workload.can_scale:
        return None
    parameters, by_devices, words = workload.Parameters(**space.constants, **point), dict[int, float](), ""
    for count in sorted({1, *nodes}):
        grown = replace(machine, world_size=machine.world_size * count)
        there: Estimate = workload.estimate(workload.scale(parameters, count), grown)
        words = words or there.description
        if foresight.objective in there.metrics:
            by_devices[grown.world_size] = there.metrics[foresight.objective]
    each = "each device" if machine.world_size == 1 else f"every {machine.world_size} devices"
    assumed = (
        f"{words} on {each}; its copies average gradients over "
        f"{machine.network_gb_s:g} GB/s a device, {machine.link_gb_s:g} GB/s within a node; the batch grows with the "
        "copies; nothing fails, nothing lags, and nobody else uses the network"
    )
    return Projection(words, by_devices, assumed)


def tell_projection(projection: Projection, config: Config, width: int) -> list[str | Table]:
    """More and more nodes, with what that assumes."""
    price = config.price_per_hour  # of a device
    (fewest, alone), *_ = projection.by_devices.items()
    rows = []
    for (devices, figure), share in zip(projection.by_devices.items(), projection.of_linear, strict=True):
        linear = alone / fewest * devices
        row = [str(devices // fewest), str(devices), said(figure), said(figure / devices), f"{share:.1%}"]
        row += [said(linear * band) for band in LINEAR_BANDS] + [said(figure * 86400 / 1e9)]
        rows.append(row + ([said(devices * price / figure / 3600 * 1e6)] if price else []))
    heading = ["nodes", "devices", config.workload.objective, "per device", "of linear"]
    heading += [*(f"{band:.0%} of linear" for band in LINEAR_BANDS), "10^9 a day"] + (["cost of 10^6"] if price else [])
    return ["", draw(heading, rows, 4, width), f"assumed: {projection.assumed}"]
