"""The matrix rates that were reached on each device, kept beside the results: what training can be held against.

A vendor's peak is a promise; the best rate that a search of products reached is a fact. `mamf_utilization` of a
training run is its rate over the one reached on the same model of GPU in the same type ("maximum achievable matmul
FLOPS" is what Bekman calls that rate).
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from sweeper.finals import Standing
from sweeper.outcome import Record

FILE = "rates.json"


@dataclass(frozen=True)
class Rate:
    """The highest rate found on one model of device, in one number format, by one statistic. TFLOP/s of one device.

    matrix_dtype   the type that its peak is of: `fp8` for all formats of 8 bits
    how            what measured it: rounds of finalists, or a single trial of a search
    """

    device: str
    dtype: str
    matrix_dtype: str
    statistic: str
    tflops: float
    tflops_low: float | None
    tflops_high: float | None
    tflops_sustained: float | None
    shape: str
    layout: str
    route: str
    how: str
    torch: str
    date: str

    @property
    def key(self) -> tuple[str, str, str]:
        return self.device, self.dtype, self.statistic


def of_sweep(device: str, best: Record, final: Sequence[Standing]) -> Rate:
    """The rate that a finished sweep has found: its winner's in the finals, else that of its best trial."""
    record, figure = best, None
    if final:
        record, figure = final[0].trial, final[0].figure
    measured = record.measurements[0]
    asked, facts = measured["executed"], measured["facts"]
    product = measured["figures"]
    shape = "x".join(f"{asked.get(name) or product.get(name, 0):.0f}" for name in "mnk")
    each = len(record.measurements)
    return Rate(
        device=device,
        dtype=str(asked["dtype"]),
        matrix_dtype=measured["matrix_dtype"],
        statistic=str(asked["statistic"]),
        tflops=(figure.value if figure else record.metrics["tflops"]) / each,
        tflops_low=(figure.low if figure else record.metrics.get("tflops_ci_low", record.metrics["tflops"])) / each,
        tflops_high=(figure.high if figure else record.metrics.get("tflops_ci_high", record.metrics["tflops"])) / each,
        tflops_sustained=record.metrics["tflops_sustained"] / each if "tflops_sustained" in record.metrics else None,
        shape=shape,
        layout=str(facts["layout"]),
        route=str(asked["route"]),
        how=f"mean of {final[0].rounds} rounds" if final else f"one trial of {len(measured['step_times_s'])} repeats",
        torch=str(facts["torch"]),
        date=datetime.fromtimestamp(record.ended_at_s, UTC).date().isoformat(),
    )


def read(folder: Path) -> list[Rate]:
    """What is kept in a results directory; nothing where there is none yet."""
    path = folder / FILE
    return [Rate(**entry) for entry in json.loads(path.read_text())] if path.exists() else []


def keep(folder: Path, rate: Rate) -> bool:
    """Keep a rate if it is the highest of its kind; whether it was. Several sweeps may do so at once."""
    with (folder / f".{FILE}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        kept = {entry.key: entry for entry in read(folder)}
        if rate.key in kept and kept[rate.key].tflops >= rate.tflops:
            return False
        kept[rate.key] = rate
        beside = folder / f".{FILE}.new"
        beside.write_text(json.dumps([asdict(kept[key]) for key in sorted(kept)], indent=1) + "\n")
        beside.replace(folder / FILE)
    return True


def reached_tflops(rates: Iterable[Rate], device: str) -> dict[str, float]:
    """By type of the matrix units, the highest median rate reached on this model of device."""
    reached: dict[str, float] = {}
    for rate in rates:
        if rate.device == device and rate.statistic.startswith("median"):
            reached[rate.matrix_dtype] = max(rate.tflops, reached.get(rate.matrix_dtype, 0.0))
    return reached
