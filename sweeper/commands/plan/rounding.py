"""Figures with the digits that the band around an estimate allows."""

from __future__ import annotations

import math

from sweeper.common.format import format_number


def round_to_band(value: float, error_share: float) -> str:
    """Return the value rounded to the first digit of its error: 1,152 within 8% is 1,150, and 57.5 is 58."""
    if not value or not math.isfinite(value):
        return format_number(value)
    place = math.floor(math.log10(abs(value) * max(error_share, 1e-4)) + 1e-9)
    rounded = round(value, -place) + 0.0
    return f"{rounded:,.{max(0, -place)}f}"


def round_change(value: float, error_share: float) -> str:
    """Return a difference with its sign."""
    return f"{'+' if value > 0 else ''}{round_to_band(value, error_share)}"


def format_share(share: float) -> str:
    """Return a share of 1 in whole percent."""
    return f"{100 * share:.0f}"
