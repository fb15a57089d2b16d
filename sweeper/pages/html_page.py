"""The report as one HTML file that opens offline and prints. Tables can be sorted and filtered; values are escaped."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from sweeper.pages.chart_style import without_markup

STYLE, SCRIPT = (Path(__file__).with_name(name).read_text() for name in ("page.css", "page.js"))
MAX_WITHOUT_CONTENTS = 3  # sections of a page without contents
LONG_TEXT = 12  # characters; shorter ones are not broken into lines
# As page.css has the colours of a light page; page.js replaces them on a dark one.
AXIS = {"gridcolor": "#e3e5e8", "zerolinecolor": "#e3e5e8", "linecolor": "#e3e5e8", "automargin": True}
LIGHT = {"font": {"color": "#1a1a1a"}, "paper_bgcolor": "#fff", "plot_bgcolor": "#fff", "xaxis": AXIS, "yaxis": AXIS}


@dataclass(frozen=True)
class Table:
    """A table of the report; one that is `unranked`, of values not measured here, is shown in another style."""

    title: str
    heading: list[str]
    rows: list[list[str]]
    note: str = ""
    unranked: bool = False


@dataclass(frozen=True)
class Chart:
    """One figure, or several side by side where there is room; below a `min_width_px` it scrolls."""

    title: str
    figures: Sequence[Any]
    note: str = ""
    min_width_px: int = 0


def build_page(title: str, tables: Sequence[Table], charts: Sequence[Chart], overview: str = "") -> str:
    """Return the HTML of the report: a paragraph for each line of the overview, the contents, and the sections."""
    sections = [_build_table(table) for table in tables]
    sections += [_build_chart(chart, include_plotly=not n) for n, chart in enumerate(charts)]
    paragraphs = "".join(f"<p class='overview'>{escape(line)}</p>" for line in overview.splitlines())
    titles = [*(table.title for table in tables), *(chart.title for chart in charts)]
    links = " · ".join(f"<a href='#s{n}'>{escape(title)}</a>" for n, title in enumerate(titles))
    contents = f"<nav>{links}</nav>" if len(titles) > MAX_WITHOUT_CONTENTS else ""
    body = "".join(section.replace("<section", f"<section id='s{n}'", 1) for n, section in enumerate(sections))
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body><h1>{escape(title)}</h1>"
        f"{paragraphs}{contents}{body}<script>{SCRIPT}</script></body></html>"
    )


def _build_chart(chart: Chart, *, include_plotly: bool) -> str:
    """Return a section, its figures in the style of the page. The first one of a page includes plotly.js for all."""
    several, scrolls = len(chart.figures) > 1, bool(chart.min_width_px)
    config = {"responsive": True, "displaylogo": False, "displayModeBar": False if several else "hover"}
    top = {"t": 50 if several else 100 if scrolls else 40}
    style = f" style='min-width:{chart.min_width_px}px'" if scrolls else ""
    cells = []
    for n, figure in enumerate(chart.figures):
        # Its own height and left margin are kept.
        figure.update_layout(template={"layout": LIGHT}, height=figure.layout.height or 440, font={"size": 13})
        figure.update_layout(margin=top if figure.layout.margin.l else {"r": 15, **top}, title={"x": 0.02, "y": 0.95})
        if not several:  # a phone has no room for a legend beside the chart
            figure.update_layout(legend={"orientation": "h", "y": -0.3, "yanchor": "top"})
        include = include_plotly and not n
        html = without_markup(figure).to_html(full_html=False, include_plotlyjs=include, config=config)
        cells.append(f"<div class='figure'{style}>{html}</div>")
    return (
        f"<section class='chart{' grid' if several else ''}'><h2>{escape(chart.title)}</h2>{_build_note(chart.note)}"
        f"<div class='{'several' if several else 'scroll'}'>{''.join(cells)}</div></section>"
    )


def _build_table(table: Table) -> str:
    heading = "".join(f"<th title='sort'>{escape(name)}</th>" for name in table.heading)
    rows = "".join(f"<tr>{''.join(map(_build_cell, row))}</tr>" for row in table.rows)
    return (
        f"<section{' class=unranked' if table.unranked else ''}><h2>{escape(table.title)}</h2>{_build_note(table.note)}"
        "<input placeholder='filter' aria-label='filter'>"
        f"<div class='scroll'><table><thead><tr>{heading}</tr></thead><tbody>{rows}</tbody></table></div></section>"
    )


def _build_note(text: str) -> str:
    return f"<p class='note'>{escape(text)}</p>" if text else ""


def _build_cell(text: str) -> str:
    is_number = re.fullmatch(r"-?[\d.,]+(e[-+]?\d+)?( [^ ]+/s)?", text)
    kind = " class=number" if is_number else " class=text" if len(text) > LONG_TEXT else ""
    return f"<td{kind}>{escape(text)}</td>"
