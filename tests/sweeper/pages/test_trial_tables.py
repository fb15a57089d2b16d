"""Tables that fit into the width of a terminal."""

import csv
import io
import math

import pytest
from rich.console import Console

from sweeper.common.trials import Remeasurement
from sweeper.pages.terminal import draw
from sweeper.pages.trial_tables import trial_rows, trials_csv
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


def test_a_round_of_the_finals_is_marked_next_to_its_number_in_the_csv() -> None:
    again = trial_record(1, {"x": 0}, remeasurement=Remeasurement(0, 2, (0,)))
    lines = trials_csv([trial_record(0), again]).splitlines()
    assert [line.split(",")[:3] for line in lines] == [
        ["trial", "remeasured_trial", "round"],
        ["0", "", ""],
        ["1", "0", "2"],
    ]


def test_an_interval_is_hidden_or_stays_on_one_line() -> None:
    cells = [["1", "1257", "1,257.5 to 1,258.5"]]
    for width, is_shown in ((40, True), (30, False)):
        Console(file=(text := io.StringIO()), width=width).print(draw(["trial", "speed", "95%"], cells, 2, width))
        assert ("1,257.5 to 1,258.5" in text.getvalue()) == is_shown == ("1,257.5" in text.getvalue())


def headings(objective: str, *trials: dict[str, float]) -> list[str]:
    records = [trial_record(number, {"x": number}, metrics=metrics) for number, metrics in enumerate(trials)]
    return trial_rows(records, objective)[0]


def test_energy_and_money_are_shown_once_and_where_they_vary() -> None:
    trial = {"tokens_per_s": 1.0, "joules_per_token": 2.0, "tokens_per_joule": 0.5, "tflop_per_joule": 3.0}
    trial |= {"cost_per_million_tokens": 4.0, "average_power_w": 500.0}
    other = trial | {"joules_per_token": 2.5, "tokens_per_joule": 0.4, "tflop_per_joule": 2.4}
    assert headings("tokens_per_s", trial, trial) == ["trial", "x", "speed tokens/s"]
    assert headings("tokens_per_s", trial, other) == ["trial", "x", "speed tokens/s", "energy J/token"]
    assert headings("tokens_per_joule", trial, other) == ["trial", "x", "energy tokens/J", "speed tokens/s"]
    assert "10^6 tokens cost" in headings("cost_per_million_tokens", trial, other)
    cheaper = other | {"cost_per_million_tokens": 3.0}
    assert headings("tokens_per_s", trial, cheaper)[-2:] == ["energy J/token", "10^6 tokens cost"]
