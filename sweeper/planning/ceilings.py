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

from sweeper.common.errors import UserInputError
from sweeper.common.trials import TrialRecord
from sweeper.search.finals import FinalistResult, Interval

FILE = "rates.json"


@dataclass(frozen=True)
class Rate:
    """The highest rate found on one model of device, in one number format, by one statistic. TFLOP/s of one device.

    matrix_dtype   the type that its peak is of: `fp8` for all formats of 8 bits
    rounds         of the finals that it is the mean of; 0: it is of a single trial of `repeats`
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
    rounds: int
    repeats: int
    torch: str
    date: str

    @property
    def how(self) -> str:
        """What measured it, in words."""
        return f"mean of {self.rounds} rounds" if self.rounds else f"one trial of {self.repeats} repeats"

    @property
    def key(self) -> tuple[str, str, str]:
        return self.device, self.dtype, self.statistic


def of_sweep(device: str, best_first: Sequence[TrialRecord], final: Sequence[FinalistResult]) -> list[Rate]:
    """What a finished sweep has found, for each format and statistic in it: in the finals, else in one trial."""
    found: dict[tuple[str, str, str], Rate] = {}
    for record, figure, rounds in [
        *((standing.trial, standing.figure, standing.rounds) for standing in final),
        *((record, None, 0) for record in best_first),
    ]:
        rate = _rate(device, record, figure, rounds)
        found.setdefault(rate.key, rate)
    return list(found.values())


def _rate(device: str, record: TrialRecord, figure: Interval | None, rounds: int) -> Rate:
    measured = record.measurements[0]
    asked, machine_info, product = measured["executed"], measured["machine_info"], measured["metrics"]
    each, metrics = len(record.measurements), record.metrics
    bounds = (figure.low, figure.high) if figure else (metrics.get("tflops_ci_low"), metrics.get("tflops_ci_high"))
    low, high = (bound / each if bound is not None else None for bound in bounds)
    return Rate(
        device=device,
        dtype=str(asked["dtype"]),
        matrix_dtype=measured["matrix_dtype"],
        statistic=str(asked["statistic"]),
        tflops=(figure.value if figure else metrics["tflops"]) / each,
        tflops_low=low,
        tflops_high=high,
        tflops_sustained=metrics["tflops_sustained"] / each if "tflops_sustained" in metrics else None,
        shape="x".join(f"{asked.get(name) or product.get(name, 0):.0f}" for name in "mnk"),
        layout=str(machine_info["layout"]),
        route=str(asked["route"]),
        rounds=rounds,
        repeats=len(measured["step_times_s"]),
        torch=str(machine_info["torch"]),
        date=datetime.fromtimestamp(record.ended_at_s, UTC).date().isoformat(),
    )


def read(folder: Path) -> list[Rate]:
    """What is kept in a results directory; nothing where there is none yet. Raises SaidWrongly for a broken file."""
    path = folder / FILE
    try:
        return [Rate(**entry) for entry in json.loads(path.read_text())] if path.exists() else []
    except (ValueError, TypeError) as error:
        raise UserInputError(f"{path}: cannot be read ({error}); move it away, a search writes another") from error


def keep(folder: Path, rates: Iterable[Rate]) -> None:
    """Keep the rates that are the highest of their kind; what finals have shown stands before any single trial, which
    may have been lucky. Several sweeps may do so at once."""
    with (folder / f".{FILE}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        kept = {entry.key: entry for entry in read(folder)}
        for rate in rates:
            known = kept.get(rate.key)
            if known is None or (rate.rounds > 0, rate.tflops) > (known.rounds > 0, known.tflops):
                kept[rate.key] = rate
        beside = folder / f".{FILE}.new"
        beside.write_text(json.dumps([asdict(kept[key]) for key in sorted(kept)], indent=1) + "\n")
        beside.replace(folder / FILE)


def reached_tflops(rates: Iterable[Rate], device: str) -> dict[str, float]:
    """By type of the matrix units, the highest median rate reached on this model of device: with a cold cache, as
    training finds it, and only where there is none of those, with a warm one."""
    reached: dict[str, float] = {}
    for statistic in ("median_warm", "median_cold"):
        found = [rate for rate in rates if rate.device == device and rate.statistic == statistic]
        for matrix_dtype in {rate.matrix_dtype for rate in found}:
            reached[matrix_dtype] = max(rate.tflops for rate in found if rate.matrix_dtype == matrix_dtype)
    return reached
