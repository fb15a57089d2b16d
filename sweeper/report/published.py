"""What others have measured, published with its source or imported: never ranked, never divided."""

from __future__ import annotations

import csv
import math
from collections.abc import Collection
from pathlib import Path
from typing import Any, cast

import pandas as pd

PUBLISHED = Path(__file__).with_name("published.csv")
HEADING = ["model", "sequence length", "type", "device", "devices", "tokens/s per device", "claimed", "stated MFU %"]
HEADING += ["FLOPs", "source", "as executed"]
NOTE = (
    "Published by others, or imported from their files; not measured here, not ranked, and not compared with what was. "
    "Steps, statistics and conventions differ: a stated MFU is by the FLOPs beside it. Of imported results the fastest "
    "of each kind, computed again from tokens and times; claimed is the tool's own."
)


def published(models: Collection[str]) -> list[list[str]]:
    """The figures of these models."""
    with PUBLISHED.open() as file:
        return [_published(row) for row in csv.DictReader(file) if row["model"] in models]


def _published(row: dict[str, str]) -> list[str]:
    speed, stated = f"{float(row['tokens_per_s_per_gpu']):,.0f}", row["stated_mfu"]
    work = [row["model"], row["sequence_length"], row["type"], row["gpu"], row["gpus"]]
    utilisation = f"{100 * float(stated):.1f}" if stated else ""
    return [*work, "", speed, utilisation, row["flops_convention"], f"published: {row['source']}", row["layout"]]


def imported(runs: pd.DataFrame) -> list[list[str]]:
    """The fastest of each kind of work on each device in each file; what a file does not say stays empty."""
    best: dict[tuple[str, ...], tuple[float, dict[str, Any]]] = {}
    for run in cast("list[dict[str, Any]]", runs.to_dict("records")):
        speed = _per_device(run, "")
        if run.get("tag.outcome") == "complete" and not math.isnan(speed):
            key = (*_work(run), str(run["parent"]))
            if speed > best.get(key, (0.0, {}))[0]:
                best[key] = speed, run
    return [_imported(speed, run) for speed, run in sorted(best.values(), key=lambda each: _place(each[1]))]


def _place(run: dict[str, Any]) -> tuple[str, float, str]:
    model, length, *_ = _work(run)
    return model, float(length or 0), run["run"]


def _work(run: dict[str, Any]) -> list[str]:
    """The first columns."""
    model = _said(run, "param.model") or f"{_said(run, 'param.model_b')}B".removeprefix("B")
    dtype = _said(run, "tag.dtype") or _said(run, "param.dtype")
    return [model, _said(run, "param.sequence_length"), dtype, _said(run, "tag.device"), _said(run, "tag.devices")]


def _imported(speed: float, run: dict[str, Any]) -> list[str]:
    claimed, stated = _per_device(run, "claimed_"), float(run.get("metric.claimed_mfu", math.nan))
    params = {name.removeprefix("param."): value for name, value in run.items() if name.startswith("param.")}
    executed = " ".join(f"{name}={value}" for name, value in params.items() if isinstance(value, str))
    utilisation = "" if math.isnan(stated) else f"{100 * stated:.1f}"
    said = "" if math.isnan(claimed) else f"{claimed:,.0f}"
    return [*_work(run), f"{speed:,.0f}", said, utilisation, "", f"imported: {run['run']}", executed]


def _per_device(run: dict[str, Any], whose: str) -> float:
    """Tokens/s of one device, where its number is known."""
    own = float(run.get(f"metric.{whose}tokens_per_s_per_gpu", math.nan))
    count = _said(run, "tag.devices")
    if math.isnan(own) and count.isdigit():
        return float(run.get(f"metric.{whose}tokens_per_s", math.nan)) / int(count)
    return own


def _said(run: dict[str, Any], name: str) -> str:
    value = run.get(name)
    return value if isinstance(value, str) else ""
