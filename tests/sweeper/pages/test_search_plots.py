"""Tests of the plots of a search."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import optuna
import pytest

from sweeper.common.trials import TrialRecord
from sweeper.pages import search_plots
from sweeper.pages.html_page import Chart
from sweeper.pages.sweep_results import Results
from tests.support.factories import trial_record

DISTRIBUTIONS = {
    "m": optuna.distributions.IntDistribution(0, 990, step=10),
    "n": optuna.distributions.CategoricalDistribution(["low", "high"]),
}
TITLES = {
    "Optimization history",
    "Parallel coordinates",
    "Each parameter by itself",
    "Parameter importances",
    "best rate TFLOP/s over all other parameters",
}


def make_records(points: Sequence[tuple[int, str, float]]) -> list[TrialRecord]:
    """Return trials with these m, n and TFLOP/s."""
    return [
        trial_record(number, {"m": m, "n": n}, metrics={"tflops": tflops})
        for number, (m, n, tflops) in enumerate(points)
    ]


def test_a_parameter_that_is_null_in_some_trials_is_in_the_heatmap() -> None:
    records = make_records([(10 * i, None if i % 2 else "low", float(i)) for i in range(20)])  # type: ignore[misc]
    assert "best rate TFLOP/s over all other parameters" in build_charts(records)


def build_charts(records: list[TrialRecord], direction: str = "maximize") -> dict[str, Chart]:
    """Return the charts by title."""
    return {chart.title: chart for chart in search_plots.build_charts(records, DISTRIBUTIONS, "tflops", direction)}


def make_search(count: int) -> list[TrialRecord]:
    return make_records([(10 * i, "high" if i % 2 else "low", float(i)) for i in range(count)])


@pytest.mark.parametrize(("trials", "dimensions", "expected"), [(5, "mn", False), (20, "mn", True), (20, "", False)])
def test_a_small_search_has_no_plots(trials: int, dimensions: str, expected: bool) -> None:
    plan: Any = SimpleNamespace(space=SimpleNamespace(dimensions=dimensions))
    results = Results(plan, {}, [], [], [], make_search(trials), [], [])
    assert results.has_plots is expected


@pytest.mark.parametrize(("trials", "direction"), [(20, "maximize"), (40, "minimize")])
def test_every_plot_is_on_the_page(tmp_path: Path, trials: int, direction: str) -> None:
    workload = SimpleNamespace(objective="tflops", direction=direction)
    plan: Any = SimpleNamespace(
        space=SimpleNamespace(dimensions="mn"), folder=tmp_path, name="s", config=SimpleNamespace(workload=workload)
    )
    study: Any = SimpleNamespace(distributions=DISTRIBUTIONS)
    (path,) = Results(plan, {}, [], [], [], make_search(trials), [], []).draw_plots(study)
    page = path.read_text()
    assert path == tmp_path / "plots" / "plots.html" and all(f"<h2>{title}" in page for title in TITLES)
    assert page.count('class="plotly-graph-div"') == 6 and "https://cdn" not in page.split("plotly-graph-div")[0][:2000]


def test_trials_of_equal_speed_have_no_importances() -> None:
    records = make_records([(10 * i, "high" if i % 2 else "low", 1.0) for i in range(40)])
    assert build_charts(records).keys() == TITLES - {"Parameter importances"}


def build_chart(title: str, records: list[TrialRecord], direction: str) -> Any:
    """Return the data of a chart's figure, and its layout."""
    (figure,) = build_charts(records, direction)[title].figures
    return figure.data[0], figure.layout


def test_a_cell_of_the_heatmap_has_the_best_value_of_its_trials() -> None:
    records = make_records([(0, "low", 3.0), (0, "low", 1.0), (10, "high", 2.0)])
    for direction, best_of_low in (("maximize", 3.0), ("minimize", 1.0)):
        cells, layout = build_chart("best rate TFLOP/s over all other parameters", records, direction)
        assert (layout.xaxis.title.text, layout.yaxis.title.text) == ("m", "n")
        assert (cells.x, cells.y) == (("0", "10"), ("high", "low"))
        assert np.array_equal(cells.z, [[np.nan, 2.0], [best_of_low, np.nan]], equal_nan=True)


def test_many_numbers_share_the_cells_of_the_heatmap() -> None:
    cells, _ = build_chart("best rate TFLOP/s over all other parameters", make_search(40), "maximize")
    assert len(cells.x) == search_plots.MAX_CELLS and cells.z.shape == (2, search_plots.MAX_CELLS)
    assert np.nanmax(cells.z) == cells.z[0, -1] == 39.0  # m=390, n=high


def test_the_highest_rank_is_the_best_trial_in_either_direction() -> None:
    for direction, best in (("maximize", 39), ("minimize", 0)):
        lines, _ = build_chart("Parallel coordinates", make_search(40), direction)
        values = [*lines.dimensions[-1]["values"]]
        assert values[int(np.argmax(lines.line.color))] == best
        bars, _ = build_chart("Parameter importances", make_search(40), direction)
        importances = dict(zip(bars.y, bars.x, strict=True))
        assert importances["m"] > 0.9 > 0.1 > importances["n"]


def test_numbers_that_are_text_are_drawn_as_numbers() -> None:
    records = [trial_record(i, {"m": str(i % 3 * 500 + 8), "n": "high"}, metrics={"tflops": i}) for i in range(20)]
    figure = build_charts(records)["Each parameter by itself"].figures[0]
    assert set(figure.data[0].x) == {8, 508, 1008} and figure.layout.xaxis.type == "log"


def test_any_number_of_parameters_has_its_panels() -> None:
    points = [{name: (7 + 5 * place) ** (i % 6) for place, name in enumerate("mnkp")} for i in range(20)]
    records = [trial_record(i, point, metrics={"tflops": float(i)}) for i, point in enumerate(points)]
    *_, slices, _, _ = search_plots.build_charts(records, "mnkp", "tflops", "maximize")
    assert [figure.layout.xaxis.type for figure in slices.figures] == ["log"] * 4  # such as 7 to 16,807
