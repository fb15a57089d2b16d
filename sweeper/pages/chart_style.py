"""The colors of charts, and untrusted texts in them: Plotly draws some HTML, links too, and matplotlib formulas."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from sweeper.common.text import one_line

# Colours that the colour-blind can tell apart (Okabe and Ito 2008), with grey for black, which a dark page hides.
COLOURS = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999"]

# All HTML but what our own labels have: line breaks, bold text, and the end of a label under the pointer.
_MARKUP = re.compile(r"<(?!/?(?:br|b|i|extra)\s*/?>)")


def without_markup(figure: Any) -> Any:
    """Return a Plotly figure whose texts have no links, images or styles: they are drawn as they stand there."""
    return type(figure)(_map_texts(figure.to_dict(), _escape))


def _escape(text: str) -> str:
    return _MARKUP.sub("&lt;", text).replace(r"\$", "&#36;")


def plain_label(value: Any) -> Any:
    """Return a value of a parameter as both libraries draw it: a text in one line, without formulas of matplotlib."""
    return one_line(value).replace("$", r"\$") if isinstance(value, str) else value


def _map_texts(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {name: _map_texts(inner, change) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_map_texts(inner, change) for inner in value]
    if isinstance(value, np.ndarray) and value.dtype.kind in "OU":
        return [_map_texts(inner, change) for inner in value.tolist()]
    return value
