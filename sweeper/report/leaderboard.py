"""The matrix rates measured here beside those that others have published, each with its statistic."""

from __future__ import annotations

import csv
import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from sweeper.common.errors import UserInputError
from sweeper.config.hardware import find_hardware
from sweeper.planning.ceilings import MatmulCeiling as Rate

# Of ml-engineering (the mean of 100 repeats with a cold cache) and gpu_benchmark (the fastest of 100, warm).
PUBLISHED = Path(__file__).with_name("published_rates.csv")
HEADING = ["GPU", "type", "TFLOP/s", "95% from", "to", "of peak %", "sustained", "m x n x k", "statistic", "source"]


def rows(rates: Sequence[Rate]) -> list[list[str]]:
    """Each GPU's rates by type, the highest first; what was measured here is marked so."""
    lines: list[tuple[str, float, list[str]]] = []
    for rate in rates:
        entry = find_hardware(rate.device)
        peak = entry.dense_peak_tflops.get(rate.matrix_dtype) if entry else None
        interval = [f"{bound:.4g}" if bound is not None else "" for bound in (rate.tflops_low, rate.tflops_high)]
        share = f"{100 * rate.tflops / peak:.1f}" if peak else ""
        sustained = f"{rate.tflops_sustained:.4g}" if rate.tflops_sustained else ""
        cells = [rate.device, rate.dtype, f"{rate.tflops:.4g}", *interval, share, sustained, rate.shape]
        cells += [f"{rate.statistic.replace('_', ', ')} cache; {rate.method}", f"here, {rate.date}, torch {rate.torch}"]
        lines.append((rate.matrix_dtype, rate.tflops, cells))
    with PUBLISHED.open() as file:
        for other in csv.DictReader(file):
            share = f"{100 * float(other['share_of_peak']):.1f}"
            cells = [other["gpu"], other["dtype"], other["tflops"], "", "", share, "", other["shape"]]
            lines.append((other["dtype"], float(other["tflops"]), [*cells, other["statistic"], other["source"]]))
    return [cells for *_, cells in sorted(lines, key=lambda line: (line[0], -line[1]))]


def payload(rates: Sequence[Rate]) -> str:
    """What sending would send: the rates, and nothing of who or where."""
    return json.dumps({"rates": [asdict(rate) for rate in rates]}, indent=1)


def send(rates: Sequence[Rate], url: str) -> str:
    """Post the payload; the answer's first line. Raises UserInputError where the address does not take it."""
    request = urllib.request.Request(
        url, data=payload(rates).encode(), headers={"Content-Type": "application/json"}, method="POST"
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            text = answer.read(1000).decode(errors="replace").strip()
            return f"{answer.status} {text.splitlines()[0] if text else ''}".strip()
    except (urllib.error.URLError, ValueError, OSError) as error:
        raise UserInputError(f"--send {url}: {getattr(error, 'reason', error)}") from error
