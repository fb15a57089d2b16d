"""Published results with their source. They were not measured here, and are never ranked or divided."""

from __future__ import annotations

import csv
import math
from collections.abc import Collection
from pathlib import Path

from sweeper.common.format import format_number, format_percent

PUBLISHED_RESULTS = Path(__file__).with_name("published.csv")
HEADING = ["model", "sequence length", "type", "device", "devices", "claimed tokens/s per device", "stated MFU %"]
HEADING += ["FLOPs", "source", "as executed"]
NOTE = (
    "Published by others: not measured here, not ranked, and not compared with the results above. Steps, statistics "
    "and conventions differ: a stated MFU uses the FLOPs in its row."
)


def list_published(models: Collection[str]) -> list[list[str]]:
    """Return the rows of the published results of these models."""
    with PUBLISHED_RESULTS.open() as file:
        return [_format_published(row) for row in csv.DictReader(file) if row["model"] in models]


def _format_published(row: dict[str, str]) -> list[str]:
    claimed = format_number(float(row["tokens_per_s_per_gpu"]))
    mfu = format_percent(float(row["stated_mfu"] or math.nan))
    work = [row["model"], row["sequence_length"], row["type"], row["gpu"], row["gpus"]]
    return [*work, claimed, mfu, row["flops_convention"], row["source"], row["layout"]]
