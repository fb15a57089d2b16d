"""Tables that fit into the width of a terminal."""

from __future__ import annotations

import csv
import io
import math

import pytest
from rich.console import Console

from sweeper.ui.tables import draw, trials_csv
from tests.support.factories import trial_record

HEADING = ["trial", "k", "rate TFLOP/s", "95% from", "to", "step ms"]
CELLS = [
    ["1", "512", "0.004226", "0.004208", "0.005608", "15.88"],
    ["0", "256", "0.002109", "0.001725", "0.002813", "1"],
]


def render(width: int, minimum: int = 3) -> str:
    text = io.StringIO()
    Console(file=text, width=width).print(draw(HEADING, CELLS, minimum, width))
    return text.getvalue()


@pytest.mark.parametrize(
    ("width", "excluded"), [(80, []), (50, ["step ms"]), (44, ["95% from", "to", "step ms"]), (10, HEADING[3:])]
)
def test_a_table_names_the_columns_that_it_hides(width: int, excluded: list[str]) -> None:
    text = " ".join(render(width).split())
    assert (f"hidden, too narrow: {', '.join(excluded)}" in text) == bool(excluded)
    assert all(("0.004208" not in text, "0.005608" not in text)) == ("to" in excluded)
    assert "0.004226" in text or width == 10  # the objective stays, wrapped if it must be


def test_a_parameter_that_is_nan_is_in_the_csv_and_an_unknown_metric_is_empty() -> None:
    text = trials_csv([trial_record(0, {"x": math.nan, "y": "nan"}, metrics={"rate": math.nan})])
    (row,) = csv.DictReader(io.StringIO(text))
    assert math.isnan(float(row["param.x"])) and row["param.y"] == "nan" and row["rate"] == ""
