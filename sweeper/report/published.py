"""Results that were not measured here: published with their source, or imported. They are never ranked or divided."""

from __future__ import annotations

import csv
import math
from collections.abc import Collection
from pathlib import Path
from typing import Any, cast

import pandas as pd

from sweeper.ui.format import format_number

PUBLISHED_RESULTS = Path(__file__).with_name("published.csv")
HEADING = ["model", "sequence length", "type", "device", "devices", "tokens/s per device", "claimed", "stated MFU %"]
HEADING += ["FLOPs", "source", "as executed"]
NOTE = (
    "Published by others or imported from their files: not measured here, not ranked, and not compared with the "
    "results above. Steps, statistics and conventions differ: a stated MFU uses the FLOPs in its row. Of imported "
    "results the fastest of each kind of work is shown, derived again from tokens and step times; claimed is the "
    "tool's own value."
)


def list_published(models: Collection[str]) -> list[list[str]]:
    """Return the rows of the published results of these models."""
    with PUBLISHED_RESULTS.open() as file:
        return [_format_published(row) for row in csv.DictReader(file) if row["model"] in models]


def _format_published(row: dict[str, str]) -> list[str]:
    claimed = format_number(float(row["tokens_per_s_per_gpu"]))
    mfu = _format_percent(float(row["stated_mfu"] or math.nan))
    work = [row["model"], row["sequence_length"], row["type"], row["gpu"], row["gpus"]]
    return [*work, "", claimed, mfu, row["flops_convention"], f"published: {row['source']}", row["layout"]]


def list_imported(runs: pd.DataFrame) -> list[list[str]]:
    """Return a row for the fastest result of each kind of work, device and file. Unknown values stay empty."""
    fastest: dict[tuple[str, ...], tuple[float, dict[str, Any]]] = {}
    for run in cast("list[dict[str, Any]]", runs.to_dict("records")):
        rate = _read_rate_per_device(run, "tokens_per_s")
        if run.get("tag.outcome") == "complete" and not math.isnan(rate):
            key = (*_read_work(run), str(run["parent"]))
            if rate > fastest.get(key, (0.0, {}))[0]:
                fastest[key] = rate, run
    return [_format_imported(rate, run) for rate, run in sorted(fastest.values(), key=lambda item: _sort_key(item[1]))]


def _sort_key(run: dict[str, Any]) -> tuple[str, float, str]:
    model, length, *_ = _read_work(run)
    return model, float(length or 0), run["run"]


def _read_work(run: dict[str, Any]) -> list[str]:
    """Return the cells of the first five columns: model, sequence length, type, device and devices."""
    model = _read_text(run, "param.model") or f"{_read_text(run, 'param.model_b')}B".removeprefix("B")
    dtype = _read_text(run, "tag.dtype") or _read_text(run, "param.dtype")
    length = _read_text(run, "param.sequence_length")
    return [model, length, dtype, _read_text(run, "tag.device"), _read_text(run, "tag.devices")]


def _format_imported(rate: float, run: dict[str, Any]) -> list[str]:
    claimed = format_number(_read_rate_per_device(run, "claimed_tokens_per_s"))
    mfu = _format_percent(float(run.get("metric.claimed_mfu", math.nan)))
    params = {name.removeprefix("param."): value for name, value in run.items() if name.startswith("param.")}
    executed = " ".join(f"{name}={value}" for name, value in params.items() if isinstance(value, str))
    return [*_read_work(run), format_number(rate), claimed, mfu, "", f"imported: {run['run']}", executed]


def _format_percent(share: float) -> str:
    return "" if math.isnan(share) else f"{100 * share:.1f}"


def _read_rate_per_device(run: dict[str, Any], metric: str) -> float:
    """Return a rate per device: as recorded, else divided by the number of devices, NaN if that is unknown."""
    per_gpu = float(run.get(f"metric.{metric}_per_gpu", math.nan))
    devices = _read_text(run, "tag.devices")
    if math.isnan(per_gpu) and devices.isdigit():
        return float(run.get(f"metric.{metric}", math.nan)) / int(devices)
    return per_gpu


def _read_text(run: dict[str, Any], name: str) -> str:
    value = run.get(name)
    return value if isinstance(value, str) else ""
