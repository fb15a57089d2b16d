"""The report as one HTML file that opens offline. Tables can be sorted and filtered, and every value is escaped."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from typing import Any

from sweeper.report.charts import Chart
from sweeper.report.summary import Table

STYLE = """
:root { color-scheme: light dark; --line: #8884; --paper: #fff; --ink: #1a1a1a; --soft: #f3f3f5; }
@media (prefers-color-scheme: dark) { :root { --paper: #16181c; --ink: #e6e6e6; --soft: #22262d; } }
body { font: 15px/1.45 system-ui, sans-serif; margin: 0 auto; max-width: 1400px; padding: 1rem;
  background: var(--paper); color: var(--ink); }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .4rem; }
.scroll { overflow-x: auto; } .note { opacity: .75; margin: .3rem 0; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .6rem; border-bottom: 1px solid var(--line); text-align: left; white-space: nowrap; }
td:last-child { white-space: normal; min-width: min(32rem, 80vw); }
th { cursor: pointer; background: var(--soft); position: sticky; top: 0; } th:hover { text-decoration: underline; }
td.number { text-align: right; } input { font: inherit; padding: .25rem .5rem; margin: .3rem 0; width: min(24rem, 100%);
  box-sizing: border-box; background: var(--soft); color: inherit; border: 1px solid var(--line); }
.figure { background: #fff; border: 1px solid var(--line); margin: .4rem 0; }
.several { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(400px, 100%), 1fr)); gap: .4rem; }
.several .figure { margin: 0; min-width: 0; overflow: hidden; }
.unranked table { font-style: italic; opacity: .85; border-left: 4px dotted var(--line); }
@media print { input { display: none } body { max-width: none } }
"""
SCRIPT = """
const toNumber = text => {
  const match = text.replaceAll(',', '').match(/^-?[\\d.]+(e[-+]?\\d+)?/); return match ? +match[0] : NaN };
for (const table of document.querySelectorAll('table')) {
  const body = table.tBodies[0], filter = table.closest('section').querySelector('input');
  filter?.addEventListener('input', () => { for (const row of body.rows)
    row.hidden = !row.textContent.toLowerCase().includes(filter.value.toLowerCase()) });
  [...table.tHead.rows[0].cells].forEach((head, n) => head.addEventListener('click', () => {
    const descending = head.dataset.order !== 'descending';
    head.dataset.order = descending ? 'descending' : 'ascending';
    const rows = [...body.rows].sort((a, b) => {
      const textA = a.cells[n].textContent, textB = b.cells[n].textContent;
      const numberA = toNumber(textA), numberB = toNumber(textB);
      const order = isNaN(numberA) || isNaN(numberB) ? textA.localeCompare(textB) : numberA - numberB;
      return descending ? -order : order });
    body.append(...rows) }))
}
"""


def build_page(title: str, tables: Sequence[Table], charts: Sequence[Chart]) -> str:
    """Return the HTML of the report."""
    sections = [_build_table(table) for table in tables]
    sections += [_build_chart(chart, include_plotly=not n) for n, chart in enumerate(charts)]
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body><h1>{escape(title)}</h1>"
        f"{''.join(sections)}<script>{SCRIPT}</script></body></html>"
    )


def _build_chart(chart: Chart, *, include_plotly: bool) -> str:
    """Return a section. The first one of a page includes plotly.js for all."""
    several = len(chart.figures) > 1
    config = {"responsive": True, "displaylogo": False, "displayModeBar": False if several else "hover"}
    cells = []
    for n, figure in enumerate(chart.figures):
        _set_layout(figure, several=several, scrolls=bool(chart.min_width_px))
        cells.append(figure.to_html(full_html=False, include_plotlyjs=include_plotly and not n, config=config))
    style = f" style='min-width:{chart.min_width_px}px'" if chart.min_width_px else ""
    figures = "".join(f"<div class='figure'{style}>{cell}</div>" for cell in cells)
    return (
        f"<section><h2>{escape(chart.title)}</h2>{_build_note(chart.note)}"
        f"<div class='{'several' if several else 'scroll'}'>{figures}</div></section>"
    )


def _set_layout(figure: Any, *, several: bool, scrolls: bool) -> None:
    """Give a figure the style of the page. Its own height and left margin are kept."""
    top = {"t": 50 if several else 70 if scrolls else 40}
    figure.update_layout(template="plotly_white", height=figure.layout.height or 440, font={"size": 13})
    figure.update_layout(margin=top if figure.layout.margin.l else {"r": 15, **top}, title={"x": 0.02, "y": 0.95})
    if not several:  # a phone has no room for a legend beside the chart
        figure.update_layout(legend={"orientation": "h", "y": -0.3, "yanchor": "top"})


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
    return f"<td{' class=number' if is_number else ''}>{escape(text)}</td>"
