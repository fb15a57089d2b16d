"""Chart style: colors, sizes, and escaping that stops Plotly from interpreting strings as markup."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sweeper.metrics.intervals import Interval

# A color-blind safe palette (Okabe and Ito 2008), with gray instead of black because pages may be dark.
COLORS = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999"]
GRAY = "#888"  # visible on light and dark pages
ROW_HEIGHT_PX = 18  # the height of a named bar
# All HTML except the tags that our labels use: line breaks, bold, italic, and the end of a hover label.
_MARKUP = re.compile(r"<(?!/?(?:br|b|i|extra)\s*/?>)")


def bar_chart_height_px(bars: int) -> int:
    return max(320, 160 + ROW_HEIGHT_PX * bars)


def build_error_bars(values: Sequence[Interval]) -> dict[str, list[float]] | None:
    """Return the intervals as Plotly error bars, or None if no value has an interval."""
    if not any(measured.has_interval for measured in values):
        return None
    below, above = zip(*(measured.errors for measured in values), strict=True)
    return {"array": list(above), "arrayminus": list(below)}


def add_band(figure: Any, xs: Sequence[float], ys: Sequence[float], shares: Sequence[float], color: str) -> None:
    """Draw a band between two multiples of a line in a Plotly figure."""
    style = {"x": xs, "mode": "lines", "line": {"width": 0}, "showlegend": False, "hoverinfo": "skip"}
    for share, fill in zip(shares, (None, "tonexty"), strict=True):
        figure.add_scatter(y=[share * y for y in ys], name=f"{share:.0%}", fill=fill, fillcolor=f"{color}33", **style)


def cut_name(name: str, length: int) -> str:
    return name if len(name) <= length else f"{name[: length - 1]}…"


def without_markup(figure: Any) -> Any:
    """Return a copy of a Plotly figure that draws text literally, without links, images or styles."""
    return type(figure)(_escape_texts(figure.to_dict()))


def _escape_texts(value: Any) -> Any:
    if isinstance(value, str):
        return _MARKUP.sub("&lt;", value)
    if isinstance(value, Mapping):
        return {name: _escape_texts(inner) for name, inner in value.items()}
    if isinstance(value, np.ndarray) and value.dtype.kind in "OU":
        value = value.tolist()
    return [_escape_texts(inner) for inner in value] if isinstance(value, (list, tuple)) else value
