"""The report as one HTML file: opens offline, tables sort and filter, every value escaped."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape

from sweeper.report.charts import Picture
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
.aside table { font-style: italic; opacity: .85; border-left: 4px dotted var(--line); }
@media print { input { display: none } body { max-width: none } }
"""
SCRIPT = """
const number = text => {
  const found = text.replaceAll(',', '').match(/^-?[\\d.]+(e[-+]?\\d+)?/); return found ? +found[0] : NaN };
for (const table of document.querySelectorAll('table')) {
  const body = table.tBodies[0], filter = table.closest('section').querySelector('input');
  filter?.addEventListener('input', () => { for (const row of body.rows)
    row.hidden = !row.textContent.toLowerCase().includes(filter.value.toLowerCase()) });
  [...table.tHead.rows[0].cells].forEach((head, n) => head.addEventListener('click', () => {
    const down = head.dataset.down !== 'yes'; head.dataset.down = down ? 'yes' : 'no';
    const rows = [...body.rows].sort((a, b) => {
      const x = a.cells[n].textContent, y = b.cells[n].textContent, p = number(x), q = number(y);
      const order = isNaN(p) || isNaN(q) ? x.localeCompare(y) : p - q; return down ? -order : order });
    body.append(...rows) }))
}
"""


def page(title: str, tables: Sequence[Table], pictures: Sequence[Picture]) -> str:
    """The whole file."""
    parts = [_table(table) for table in tables]
    parts += [_picture(picture, carries_plotly=not n) for n, picture in enumerate(pictures)]
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body><h1>{escape(title)}</h1>"
        f"{''.join(parts)}<script>{SCRIPT}</script></body></html>"
    )


def _picture(picture: Picture, *, carries_plotly: bool) -> str:
    """A section. The first of a page carries plotly.js for all."""
    several = len(picture.figures) > 1
    for figure in picture.figures:
        top = {"t": 50 if several else 70 if picture.wide else 40}
        figure.update_layout(template="plotly_white", height=figure.layout.height or 440, font={"size": 13})
        figure.update_layout(margin=top if figure.layout.margin.l else {"r": 15, **top}, title={"x": 0.02, "y": 0.95})
        if not several:  # beside the picture there is no room on a phone, above it only for a line
            figure.update_layout(legend={"orientation": "h", "y": -0.3, "yanchor": "top"})
    drawn = [
        figure.to_html(
            full_html=False,
            include_plotlyjs=carries_plotly and not n,
            config={"responsive": True, "displaylogo": False, "displayModeBar": False if several else "hover"},
        )
        for n, figure in enumerate(picture.figures)
    ]
    style = f" style='min-width:{picture.wide}px'" if picture.wide else ""
    cells = "".join(f"<div class='figure'{style}>{each}</div>" for each in drawn)
    return (
        f"<section><h2>{escape(picture.title)}</h2>{_note(picture.note)}"
        f"<div class='{'several' if several else 'scroll'}'>{cells}</div></section>"
    )


def _table(table: Table) -> str:
    head = "".join(f"<th title='sort'>{escape(name)}</th>" for name in table.heading)
    rows = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in table.rows)
    return (
        f"<section{' class=aside' if table.aside else ''}><h2>{escape(table.title)}</h2>{_note(table.note)}"
        "<input placeholder='filter' aria-label='filter'>"
        f"<div class='scroll'><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div></section>"
    )


def _note(text: str) -> str:
    return f"<p class='note'>{escape(text)}</p>" if text else ""


def _cell(text: str) -> str:
    numeric = re.fullmatch(r"-?[\d.,]+(e[-+]?\d+)?( [^ ]+/s)?", text)
    return f"<td{' class=number' if numeric else ''}>{escape(text)}</td>"
