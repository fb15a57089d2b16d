"""The page of a plan, in a real browser too."""

from dataclasses import replace
from pathlib import Path

import pytest

from sweeper.commands.plan.answer import Answer, answer, scale
from sweeper.commands.plan.main import COMMAND
from sweeper.commands.plan.page import build_page, draw_bars, draw_pipeline, draw_scaling
from sweeper.commands.plan.request import read_request
from tests.support import browser
from workloads.api.contract import BandEnds
from workloads.api.errors import UserInputError

WORDS = ["model=llama3_8b", "hardware=h100", "gpus=8", "pp=4", "tp=1", "cp=1", "micro_batch=1", "schedule=1f1b"]
WIDEST = "Math.max(...[...document.querySelectorAll('td, .main-svg, p, dd')].map(e => e.getBoundingClientRect().right))"


@pytest.fixture(scope="module")
def planned() -> Answer:
    return answer(read_request(WORDS))


def test_the_parts_of_a_bar_are_stacked_and_its_text_is_a_note() -> None:
    bars = {"first": {"a": 1.0, "b": 3.0}, "second": {"a": 2.0}}
    chart = draw_bars("Time", bars, {"b": "#111", "a": "#222", "c": "#333"}, "s", 0.1)
    (figure,) = chart.figures
    assert figure.layout.barmode == "stack"
    assert [(part.name, part.marker.color, *part.x) for part in figure.data] == [
        ("b", "#111", 3.0, 0.0),
        ("a", "#222", 1.0, 2.0),
    ]
    assert chart.note == "1: first\n2: second" and figure.data[0].hovertext[0] == "b: 3.0 s"


def test_scaling_is_drawn_over_a_logarithmic_axis_with_its_band() -> None:
    figure = draw_scaling(dict.fromkeys((1, 4, 16), 100.0), BandEnds(0.1, 0.05))
    low, high, line = figure.data
    assert (low.y[2], high.y[2], *line.x) == pytest.approx((90, 105, 1, 4, 16))
    assert figure.layout.xaxis.type == "log" and figure.layout.xaxis.tickvals == (16, 1)


def test_the_page_has_the_plan_and_its_pictures(planned: Answer) -> None:
    page = build_page(planned, {8: planned.best})
    for text in ("Where the time goes", "Where the memory goes", "The pipeline", "The given layout and the fastest"):
        assert f"<h2>{text}</h2>" in page
    assert "Scaling" not in page.split("</nav>")[1]
    chart = draw_pipeline(planned)
    assert "Schedule 1f1b, 8 micro-batches of 256" in chart.note
    assert sum(len(passes.x) for passes in chart.figures[0].data) == 2 * 4 * 8  # directions, ranks, micro-batches


def test_scaling_shows_that_the_batch_grows(planned: Answer) -> None:
    larger = replace(planned.best.estimate, tokens=2 * planned.best.estimate.tokens)
    page = build_page(planned, {8: planned.best, 16: replace(planned.best, estimate=larger)})
    assert "M tokens a step" in page and "The batch grows with the GPUs" in page
    assert "The batch grows" not in build_page(planned, {8: planned.best, 16: planned.best})


def test_a_page_that_cannot_be_written_is_named_before_anything_is_planned(tmp_path: Path) -> None:
    with pytest.raises(UserInputError, match=r"out=.*plan: no such directory"):
        COMMAND.run(["model=llama3_8b", "hardware=h100", "gpus=8", f"out={tmp_path}/plan/plan.html"])


@browser.needs_chromium
def test_the_page_fits_any_screen_and_needs_no_network(planned: Answer, tmp_path: Path) -> None:
    path = tmp_path / "plan.html"
    scaling = scale(planned.problem)
    assert list(scaling) == [2**power for power in range(2, 13)]  # pp=4
    path.write_text(build_page(planned, scaling))
    with browser.open_page() as tab:
        for width, dark in ((1400, False), (390, True)):
            tab.open(path.as_uri(), width=width, dark=dark)
            assert tab.evaluate("document.documentElement.scrollWidth") <= width
            assert tab.evaluate(WIDEST) <= width
        assert not tab.errors and all(url.startswith(("file:", "data:", "blob:")) for url in tab.requests)
