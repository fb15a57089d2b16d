"""Topologies from plain values, and rates that were measured on devices: the planner's table."""

from __future__ import annotations

import csv
import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

from workloads.estimator.cluster import Topology

TABLES = Path(__file__).parent / "tables"
NUMBERS = {"gpus_per_domain": int, "link_gb_s": float, "network_gb_s": float, "oversubscription": float}
LATENCIES = {"link_latency_s": float, "network_latency_s": float}
REQUIRED = ("gpus_per_domain", "wiring", "link_gb_s", "network_gb_s")
WIRINGS = ("switch", "pairs", "host")


def build_topology(values: Mapping[str, Any]) -> Topology:
    """Return the topology that a file of `conf/topology` or of the user's own describes.

    Raises:
        ValueError: a key is missing, unknown or has a value that is not allowed.
    """
    name = f"topology {values.get('name', '')}".rstrip()
    allowed = [field.name for field in fields(Topology)]
    unknown = [key for key in values if key not in (*allowed, "source")]
    missing = [key for key in REQUIRED if values.get(key) in (None, "")]
    if unknown:
        hint = _suggest(unknown[0], allowed)
        raise ValueError(f"{name}: unknown key '{unknown[0]}'. Allowed: {', '.join(sorted(allowed))}{hint}")
    if missing:
        raise ValueError(
            f"{name}: {', '.join(missing)} missing. Required: {', '.join(REQUIRED)}; wiring is one of "
            f"{', '.join(WIRINGS)}"
        )
    if values["wiring"] not in WIRINGS:
        hint = _suggest(str(values["wiring"]), WIRINGS)
        raise ValueError(f"{name}: wiring is '{values['wiring']}'. Allowed: {', '.join(WIRINGS)}{hint}")
    numbers = {
        key: _number(name, key, kind, values[key]) for key, kind in (NUMBERS | LATENCIES).items() if key in values
    }
    return Topology(name=str(values.get("name", "topology")), wiring=values["wiring"], **numbers)


def _suggest(word: str, allowed: Sequence[str]) -> str:
    close = difflib.get_close_matches(word, allowed, n=1)
    return f". Did you mean {close[0]}?" if close else ""


def _number(name: str, key: str, kind: type, value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name}: {key} is '{value}', which is not a number")
    if not 0 < value < math.inf:
        raise ValueError(f"{name}: {key} is {value}, but has to be above 0 and finite")
    if kind is int and value != int(value):
        raise ValueError(f"{name}: {key} is {value}, but has to be a whole number")
    return kind(value)


def measured_tflops(device: str) -> dict[str, float]:
    """Return the measured rates of large products on a device by data type; empty where the table has none."""
    return {row["dtype"]: float(row["tflops"]) for row in _device_rates() if row["device"] == device}


def power_headroom(device: str) -> float:
    """Return how much faster a device's products run while the power cap does not limit them; 1 where unknown."""
    rows = (row for row in _device_rates() if row["device"] == device and row["power_headroom"])
    return next((float(row["power_headroom"]) for row in rows), 1.0)


@cache
def _device_rates() -> list[dict[str, str]]:
    with (TABLES / "device_rates.csv").open(newline="") as lines:
        return list(csv.DictReader(lines))
