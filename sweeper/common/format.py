"""Format numbers and parameters for tables and messages. CSV and JSON hold unrounded values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from sweeper.common.trials import short_value

TIE = "a tie"  # how the verdict begins if the finals cannot tell the first two apart


def format_number(value: float) -> str:
    """Return a measured number with thousands separators and no decimals from 1000 on, else with four digits.

    NaN, a value that is not known, is empty.
    """
    if math.isnan(value):
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def format_interval(low: float, high: float) -> str:
    """Return the bounds of an interval: `1.5 to 2.5`; empty if either is not known."""
    return "" if math.isnan(low) or math.isnan(high) else f"{format_number(low)} to {format_number(high)}"


def format_percent(share: float) -> str:
    """Return a share of 1 in percent, without the sign; NaN is empty."""
    return "" if math.isnan(share) else f"{100 * share:.1f}"


def format_point(params: Mapping[str, Any]) -> str:
    """Return a point of the space: `m=4096 n=512`."""
    return " ".join(f"{name}={short_value(value)}" for name, value in params.items()) or "no varying parameter"


def format_duration(seconds: float) -> str:
    """Return `m:ss`, from an hour on `h:mm:ss`."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def format_phases(seconds: Mapping[str, float]) -> str:
    """Return what a command took and where: `12.3 s: start 4.1, trials 0.3, recording 2.0`. Moments are left out."""
    parts = [f"{name} {value:.1f}" for name, value in seconds.items() if value >= 0.05]
    total = sum(seconds.values())
    shown = f"{total:.1f} s" if total < 600 else f"{format_duration(total)} ({total:.0f} s)"
    return f"{shown}: {', '.join(parts)}"


def count(number: int, noun: str) -> str:
    """Return the number with its noun, in the plural where it is not one: `3 trials`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
