"""The pictures of a search."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import optuna

from sweeper.ui import plots
from tests.support.factories import finals_record as record

DISTRIBUTIONS = {
    "m": optuna.distributions.IntDistribution(0, 990, step=10),
    "n": optuna.distributions.CategoricalDistribution(["low", "high"]),
}


def trials(count: int) -> list[object]:
    return [
        replace(record(i, float(i)), params={"m": 10 * i, "n": "high" if i % 2 else "low"}, metrics={"tflops": i * 1.0})
        for i in range(count)
    ]


def test_a_small_search_has_none(tmp_path: Path) -> None:
    assert plots.draw(tmp_path, trials(5), DISTRIBUTIONS, "tflops", "maximize") == []  # type: ignore[arg-type]


def test_every_picture_is_an_image_and_on_the_page(tmp_path: Path) -> None:
    drawn = plots.draw(tmp_path, trials(40), DISTRIBUTIONS, "tflops", "maximize")  # type: ignore[arg-type]
    names = {path.name for path in drawn}
    assert names == {f"{n}.png" for n in (*plots.PLOTS, "heatmap")} | {"pictures.html"}
    assert all(path.read_bytes()[:4] == b"\x89PNG" for path in drawn if path.suffix == ".png")
    page = (tmp_path / "pictures.html").read_text()
    assert page.count('class="plotly-graph-div"') == 5 and "https://cdn" not in page.split("plotly-graph-div")[0][:2000]


def test_a_cell_of_the_heatmap_holds_the_best_of_what_fell_into_it() -> None:
    study = optuna.create_study()
    for m, n, value in [(0, "low", 3.0), (0, "low", 1.0), (10, "high", 2.0)]:
        trial = optuna.create_trial(params={"m": m, "n": n}, distributions=DISTRIBUTIONS, value=value)
        study.add_trial(trial)
    x, y, xs, ys, best = plots.heat(study.trials, minimize=False) or ("", "", [], [], [])
    assert (x, y, xs, ys) == ("m", "n", ["0", "10"], ["high", "low"])
    assert best[1][0] == 3.0 and best[0][1] == 2.0 and math.isnan(best[0][0])
    low = plots.heat(study.trials, minimize=True)
    assert low is not None and low[4][1][0] == 1.0
