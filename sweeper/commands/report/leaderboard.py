"""Tabulate locally measured matmul rates next to published rates, with the statistic behind each rate."""

import csv
import math
from collections.abc import Sequence
from pathlib import Path

from sweeper.common.format import format_number
from sweeper.config.catalogue import catalogue, find_hardware
from sweeper.config.schema import Hardware
from sweeper.preflight.ceilings import MatmulCeiling

# From ml-engineering (mean of 100 repeats with a cold cache) and gpu_benchmark (fastest of 100, warm cache).
PUBLISHED_RATES = Path(__file__).with_name("published_rates.csv")
ABOVE = "* the catalogue's peak is at the boost clock of the data sheet; a GPU that runs above it exceeds the peak"
HEADING = ["GPU", "type", "TFLOP/s", "95% from", "to", "of peak %", "sustained", "m x n x k", "statistic", "source"]


def build_rows(rates: Sequence[MatmulCeiling]) -> list[list[str]]:
    """Return rows of measured and published rates, grouped by dtype, with the highest rate first."""
    keyed = []
    for rate in rates:
        bounds = [math.nan if bound is None else bound for bound in (rate.tflops_low, rate.tflops_high)]
        numbers = [format_number(rate.tflops), *map(format_number, bounds)]
        share = _format_share(rate.tflops, rate.matrix_dtype, find_hardware(rate.device))
        sustained = format_number(rate.tflops_sustained or math.nan)
        statistic = f"{rate.statistic.replace('_', ', ')} cache; {rate.method}"
        source = f"here, {rate.date}, torch {rate.torch}"
        cells = [rate.device, rate.dtype, *numbers, share, sustained, rate.shape, statistic, source]
        keyed.append((rate.matrix_dtype, -rate.tflops, cells))
    with PUBLISHED_RATES.open() as file:
        for row in csv.DictReader(file):
            tflops, dtype = float(row["tflops"]), row["dtype"]
            share = _format_share(tflops, dtype, catalogue()[row["hardware"]])
            cells = [row["gpu"], dtype, format_number(tflops), "", "", share, ""]
            keyed.append((dtype, -tflops, [*cells, row["shape"], row["statistic"], row["source"]]))
    return [cells for *_, cells in sorted(keyed, key=lambda item: item[:2])]


def _format_share(tflops: float, dtype: str, hardware: Hardware | None) -> str:
    peak_tflops = hardware.dense_peak_tflops.get(dtype) if hardware else None
    above = "*" if peak_tflops and tflops > peak_tflops else ""
    return f"{100 * tflops / peak_tflops:.1f}{above}" if peak_tflops else ""
