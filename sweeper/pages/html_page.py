"""Build a single HTML file of results for offline use and printing. Tables can be sorted and filtered."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

from jinja2 import Environment, PackageLoader
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from sweeper.common.format import find_numeric
from sweeper.pages.chart_style import without_markup

# The light colors of page.css. On a dark page, page.js replaces them.
AXIS = {"gridcolor": "#e3e5e8", "zerolinecolor": "#e3e5e8", "linecolor": "#e3e5e8", "automargin": True}
LIGHT = {"font": {"color": "#1a1a1a"}, "paper_bgcolor": "#fff", "plot_bgcolor": "#fff", "xaxis": AXIS, "yaxis": AXIS}


@dataclass(frozen=True)
class Table:
    """A table on the page. An `unranked` table contains values from elsewhere and is styled differently."""

    title: str
    heading: list[str]
    rows: list[list[str]]
    note: str = ""
    unranked: bool = False
    figures: ClassVar[Sequence[Any]] = ()

    @property
    def style(self) -> str:
        return "unranked" if self.unranked else ""

    @property
    def numeric(self) -> list[bool]:
        return find_numeric(self.rows)


def drop_empty(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> tuple[list[str], list[list[str]]]:
    """Return a table's heading and rows without the columns that have only empty cells."""
    kept = [column for column in range(len(heading)) if any(row[column] for row in rows)]
    return [heading[column] for column in kept], [[row[column] for column in kept] for row in rows]


@dataclass(frozen=True)
class Chart:
    """One figure, or several side by side if there is room. A chart scrolls if it has less room than `min_width_px`."""

    title: str
    figures: Sequence[Any]
    note: str = ""
    min_width_px: int = 0

    @property
    def style(self) -> str:
        return "chart grid" if len(self.figures) > 1 else "chart"


def build_page(
    title: str, sections: Sequence[Table | Chart], overview: str = "", terms: Sequence[tuple[str, Sequence[str]]] = ()
) -> str:
    """Return the HTML: a paragraph for each line of `overview`, the terms, a table of contents, and the sections."""
    plotly = get_plotlyjs() if any(section.figures for section in sections) else ""
    values = {"title": title, "sections": sections, "overview": overview, "terms": terms, "plotly": plotly}
    return _environment().get_template("page.html").render(values)


@cache
def _environment() -> Environment:
    environment = Environment(loader=PackageLoader("sweeper.pages", "."), autoescape=True)
    environment.globals["draw"] = _draw
    return environment


def _draw(chart: Chart, figure: Any) -> Markup:
    several = len(chart.figures) > 1
    top = {"t": 50 if several else figure.layout.margin.t or 40}
    # Keep the figure's height and left margin if they are set.
    figure.update_layout(template={"layout": LIGHT}, height=figure.layout.height or 440, font={"size": 13})
    figure.update_layout(margin=top if figure.layout.margin.l else {"r": 15, **top}, title={"x": 0.02, "y": 0.95})
    if not several:  # a phone has no room for a legend next to the chart
        figure.update_layout(legend={"orientation": "h", "y": -0.3, "yanchor": "top"})
    config = {"responsive": True, "displaylogo": False}
    return Markup(without_markup(figure).to_html(full_html=False, include_plotlyjs=False, config=config))
