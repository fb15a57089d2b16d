"""The picture of a front."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from optuna.distributions import IntDistribution

from sweeper.pages.front_plot import build_front_chart
from sweeper.pages.html_page import Chart
from sweeper.pages.sweep_results import Results
from sweeper.search.front import Front
from tests.support.factories import trial_record

METRICS = ("tokens_per_s", "peak_device_gib", "mfu")


def make_chart(objectives: int) -> Chart:
    records = [
        trial_record(n, metrics={"tokens_per_s": 10.0 + n, "peak_device_gib": float(n % 7), "mfu": 0.1 * (n % 3)})
        for n in range(20)
    ]
    return build_front_chart(records, METRICS[:objectives], {14, 19, 18})


@pytest.mark.parametrize(("objectives", "panels"), [(2, 1), (3, 3)])
def test_each_pair_of_objectives_has_a_panel_with_the_front_in_order(objectives: int, panels: int) -> None:
    figures = make_chart(objectives).figures
    assert len(figures) == panels and all(len(figure.data) == 2 for figure in figures)
    figure = figures[0]
    assert [*figure.data[1].hovertext] == ["trial 14: x=14", "trial 18: x=18", "trial 19: x=19"]
    assert [*figure.data[1].text] == ["14", "18", "19"]
    assert figure.layout.xaxis.title.text == "device GiB" and figure.layout.yaxis.title.text == "speed tokens/s"
    assert all(len(chart.x) == (17 if chart.name == "trials" else 3) for chart in figure.data)
    if objectives == 3:  # a fraction is shown in percent
        x = figures[1].layout.xaxis.title.text
        assert max(figures[1].data[1].x) == pytest.approx(20.0) and x == "MFU %"


def test_values_of_different_magnitudes_have_a_logarithmic_axis() -> None:
    records = [trial_record(n, metrics={"tflops": 10.0**-n, "loss": 1.0 + n}) for n in range(4)]
    (figure,) = build_front_chart(records, ("tflops", "loss"), {0}).figures
    assert (figure.layout.yaxis.type, figure.layout.xaxis.type) == ("log", "linear")


def test_the_plots_of_a_sweep_begin_with_its_front(tmp_path: Path) -> None:
    records = [trial_record(n, metrics={"tokens_per_s": 10.0 + n, "peak_device_gib": float(n % 7)}) for n in range(20)]
    workload = SimpleNamespace(objective="tokens_per_s", direction="maximize")
    plan: Any = SimpleNamespace(
        space=SimpleNamespace(dimensions="x"),
        folder=tmp_path,
        name="s",
        config=SimpleNamespace(workload=workload),
        criteria=SimpleNamespace(metrics=METRICS[:2]),
    )
    front = Front([records[14], records[19]], [])
    study: Any = SimpleNamespace(distributions={"x": IntDistribution(0, 20)})
    (path,) = Results(plan, {}, [], [], [], records, [], [], front).draw_plots(study)
    page = path.read_text()
    assert 0 < page.index("Pareto front of 2 of 20 trials") < page.index("Optimization history")
