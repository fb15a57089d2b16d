"""Tables in the width that there is."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from sweeper.ui.tables import draw

HEADING = ["trial", "k", "rate TFLOP/s", "95% from", "to", "step ms"]
CELLS = [
    ["1", "512", "0.004226", "0.004208", "0.005608", "15.88"],
    ["0", "256", "0.002109", "0.001725", "0.002813", "1"],
]


def drawn(width: int, at_least: int = 3) -> str:
    text = io.StringIO()
    Console(file=text, width=width).print(draw(HEADING, CELLS, at_least, width))
    return text.getvalue()


@pytest.mark.parametrize(
    ("width", "excluded"), [(80, []), (50, ["step ms"]), (44, ["95% from", "to", "step ms"]), (10, HEADING[3:])]
)
def test_what_there_is_no_room_for_is_said(width: int, excluded: list[str]) -> None:
    said = " ".join(drawn(width).split())
    assert (f"no room for: {', '.join(excluded)}" in said) == bool(excluded)
    assert all(("0.004208" not in said, "0.005608" not in said)) == ("to" in excluded)
    assert "0.004226" in said or width == 10  # what is ranked by stays, in pieces if it has to
