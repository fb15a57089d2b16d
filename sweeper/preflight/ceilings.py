"""Store the highest matmul rates measured on each device in a file next to the results.

A training run's `mamf_utilization` is the run's rate divided by the highest matmul rate on the same GPU model with the
same dtype ("maximum achievable matmul FLOPS", Bekman, ml-engineering).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from sweeper.common.trials import TrialRecord
from sweeper.metrics.intervals import Interval
from sweeper.preflight.kept_rows import read_rows, replace_rows
from sweeper.search.finals import FinalistResult

FILE = "matmul_ceilings.json"


@dataclass(frozen=True)
class MatmulCeiling:
    """The highest matmul rate of a device model in one number format, in TFLOP/s per device."""

    device: str
    dtype: str
    matrix_dtype: str  # the dtype of the peak: `fp8` for all 8-bit formats
    statistic: str
    tflops: float
    tflops_low: float | None
    tflops_high: float | None
    tflops_sustained: float | None
    shape: str
    layout: str
    backend: str
    rounds: int  # the number of finals rounds in the mean; 0 for a single trial of `repeats`
    repeats: int
    torch: str
    date: str

    @property
    def key(self) -> tuple[str, str, str]:
        return self.device, self.dtype, self.statistic


def from_sweep(
    device: str, best_first: Sequence[TrialRecord], finalists: Sequence[FinalistResult]
) -> list[MatmulCeiling]:
    """Return a finished sweep's ceiling for each format and statistic, from the finals or else from one trial."""
    found = [_from_trial(device, finalist.trial, finalist.value, finalist.rounds) for finalist in finalists]
    found += [_from_trial(device, record, None, 0) for record in best_first]
    ceilings: dict[tuple[str, str, str], MatmulCeiling] = {}
    for ceiling in found:
        ceilings.setdefault(ceiling.key, ceiling)
    return list(ceilings.values())


def _from_trial(device: str, record: TrialRecord, value: Interval | None, rounds: int) -> MatmulCeiling:
    first_rank = record.measurements[0]
    executed, info, extra = first_rank["executed"], first_rank["machine_info"], first_rank["metrics"]
    ranks, metrics = len(record.measurements), record.metrics
    bounds = (value.low, value.high) if value else (metrics.get("tflops_ci_low"), metrics.get("tflops_ci_high"))
    low, high = (bound / ranks if bound is not None else None for bound in bounds)
    return MatmulCeiling(
        device=device,
        dtype=str(executed["dtype"]),
        matrix_dtype=first_rank["matrix_dtype"],
        statistic=str(executed["statistic"]),
        tflops=(value.value if value else metrics["tflops"]) / ranks,
        tflops_low=low,
        tflops_high=high,
        tflops_sustained=metrics["tflops_sustained"] / ranks if "tflops_sustained" in metrics else None,
        shape="x".join(f"{executed.get(name) or extra.get(name, 0):.0f}" for name in ("m", "n", "k")),
        layout=str(info["layout"]),
        backend=str(executed["backend"]),
        rounds=rounds,
        repeats=len(first_rank["step_times_s"]),
        torch=str(info["torch"]),
        date=datetime.fromtimestamp(record.ended_at_s, UTC).date().isoformat(),
    )


def read(folder: Path) -> list[MatmulCeiling]:
    """Return the ceilings stored in a results directory. Raises UserInputError if the file cannot be read."""
    return read_rows(folder, FILE, lambda fields: MatmulCeiling(**fields))


def keep(folder: Path, ceilings: Iterable[MatmulCeiling]) -> None:
    """Store the highest ceiling for each key. Finals take precedence: a single trial may be high by chance."""

    def merge() -> list[MatmulCeiling]:
        stored = {ceiling.key: ceiling for ceiling in read(folder)}
        for ceiling in ceilings:
            known = stored.get(ceiling.key)
            if known is None or (ceiling.rounds > 0, ceiling.tflops) > (known.rounds > 0, known.tflops):
                stored[ceiling.key] = ceiling
        return [stored[key] for key in sorted(stored)]

    replace_rows(folder, FILE, merge)


def achieved_tflops(ceilings: Sequence[MatmulCeiling], device: str) -> dict[str, float]:
    """Return the highest median rates on this device model in TFLOP/s per device, by the matrix units' dtype.
    Cold-cache medians take precedence because training reads its operands from memory. Warm-cache medians fill gaps."""
    medians = [c for c in ceilings if c.device == device and c.statistic in ("median_warm", "median_cold")]
    medians.sort(key=lambda ceiling: (ceiling.statistic == "median_cold", ceiling.tflops))
    return {ceiling.matrix_dtype: ceiling.tflops for ceiling in medians}  # the last one of each dtype counts
