"""Correct planned step times by measured factors, one for each device, trainer and routing.

A sweep's trials correct the estimates of later plans and sweeps on the same cluster. A factor never changes the order
of layouts.
"""

import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from sweeper.common.trials import TrialRecord, TrialStatus
from sweeper.config.hardware import Target
from sweeper.config.resolution import ResolvedConfig
from sweeper.config.space import Space
from sweeper.preflight.calibration import CalibrationFile, device_key
from sweeper.preflight.kept_rows import read_rows, replace_rows
from workloads.api.contract import Machine, Scalar

FILE = "planner_corrections.json"
RATE = "tokens_per_s"
# The estimated metrics that depend on step time. A metric is multiplied by the factor raised to this power.
POWERS = {RATE: -1, "mfu": -1, "step_time_ms": 1}
FEWEST_ROWS = 3  # minimum number of trials for a correction
ROUTING = "imbalance"  # each value of this parameter has its own factor, because natural routing depends on the run


@dataclass(frozen=True)
class Place:
    device: str  # the catalog name with the partition mode; for a CPU, the model
    trainer: str  # the training program, such as the workload
    gpus: int  # ranks per trial
    gpus_per_node: int
    topology: str  # the name of the topology
    benchmark_version: str
    calibrated: str = ""  # the date of the calibration behind the estimates; empty for the tables' rates
    routing: str = ""  # the imbalance forced on the experts, or the imbalances in a sweep; empty for none


@dataclass(frozen=True)
class Correction:
    """The ratio of measured to planned step times at a `Place`: the median over the measured layouts."""

    place: Place
    factor: float  # measured step time divided by planned step time
    rows: int  # the number of measured layouts
    low: float  # the smallest factor of a layout
    high: float  # the largest factor of a layout
    date: str  # the date of the last measurement

    def describe(self) -> str:
        place = self.place
        devices = f"{place.gpus} x {place.device}, {place.gpus_per_node} a node, on {self.date}"
        measured = f"the median of {self.rows} layouts of {place.trainer} measured on {devices}"
        return f"step times x {self.factor:.3g}, {measured} ({self.low:.3g} to {self.high:.3g})"


def place_of(
    target: Target, resolved: ResolvedConfig, space: Space, machine: Machine, calibration: CalibrationFile | None
) -> Place:
    routing = space.dimensions.get(ROUTING) or space.constants.get(ROUTING)
    return Place(
        device=device_key(target.hardware) if target.is_gpu else target.model,
        trainer=str((resolved.settings or {}).get("trainer") or resolved.config.workload.name),
        gpus=machine.world_size,
        gpus_per_node=machine.ranks_per_node,
        topology=machine.cluster.topology.name,
        benchmark_version=resolved.workload.benchmark_version,
        calibrated=calibration.rates.date if calibration else "",
        routing="" if routing is None else str(routing),
    )


def corrected(metrics: Mapping[str, float], factor: float) -> dict[str, float]:
    """Return the metrics that result if steps take `factor` times as long as estimated."""
    return {name: value * factor ** POWERS.get(name, 0) for name, value in metrics.items()}


def from_sweep(
    place: Place,
    before: Correction | None,
    estimated_metrics: Callable[[Mapping[str, Scalar]], Mapping[str, float]],
    records: Iterable[TrialRecord],
) -> Correction | None:
    """Return the correction from the trials of a sweep with estimates corrected by `before`, or None if there are too
    few trials. Failed trials and trials of the finals do not count."""
    values, ended_at_s = list[float](), 0.0
    for record in records:
        measured, estimated = record.metrics.get(RATE), estimated_metrics(record.params).get(RATE)
        ended_at_s = max(ended_at_s, record.ended_at_s)
        if record.status is TrialStatus.COMPLETE and not record.remeasurement and measured and estimated:
            values.append(estimated / measured)
    if len(values) < FEWEST_ROWS:
        return None
    factors = sorted((before.factor if before else 1.0) * value for value in values)
    date = datetime.fromtimestamp(ended_at_s, UTC).date().isoformat()
    return Correction(place, statistics.median(factors), len(factors), factors[0], factors[-1], date)


def read(folder: Path) -> list[Correction]:
    """Return the corrections stored in a results directory. Raises UserInputError if the file cannot be read."""
    return read_rows(folder, FILE, lambda fields: Correction(**{**fields, "place": Place(**fields["place"])}))


def find(corrections: Iterable[Correction], place: Place) -> Correction | None:
    return next((correction for correction in corrections if correction.place == place), None)


def keep(folder: Path, kept: Correction) -> None:
    """Store a correction, replacing any earlier correction for the same `Place`."""
    replace_rows(folder, FILE, lambda: [*(row for row in read(folder) if row.place != kept.place), kept])
