"""Show a result as HTML in a notebook cell: best trials, finals or front, and a plot of the objective by trial."""

from collections import Counter
from html import escape

from sweeper.common.format import format_number
from sweeper.pages.trial_tables import Rows, finalist_rows, format_counts, front_rows, trial_rows
from sweeper.results.stored import StoredSweep
from sweeper.search.finals import finalist_results
from workloads.api.metrics import get_metric

SHOWN_TRIALS = 10
WIDTH, HEIGHT, MARGIN, RADIUS = 480, 160, 20, 3  # dimensions of the picture in pixels


def build_html(stored: StoredSweep) -> str:
    """Return the HTML for a sweep with a description. The page adopts the notebook's light or dark colors."""
    ranked, records, criteria = stored.ranked, stored.current_records, stored.description.criteria
    top = int(stored.description.config["finals"]["top"])
    front, objective = stored.front, criteria.objective
    numbers = front.numbers if front else []
    tables = [trial_rows(ranked[:SHOWN_TRIALS], objective, criteria.metrics[1:], numbers)] if ranked else []
    if front:
        tables.append(front_rows(front, criteria.metrics))
    elif finalists := finalist_results(ranked, top, records, criteria):
        tables.append(finalist_rows(finalists, objective))
    counts = Counter(record.status for record in records if not record.remeasurement)
    heading = f"<p><b>{escape(stored.name)}</b>: {format_counts(counts)}</p>"
    points = {record.number: record.metrics[objective] * get_metric(objective).factor for record in ranked}
    return heading + "".join(map(_build_table, tables)) + (_draw(points, objective) if len(points) > 1 else "")


def _build_table(rows: Rows) -> str:
    lines = [
        "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells)
        for tag, cells in (("th", rows.heading), *(("td", cells) for cells in rows.cells))
    ]
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def _draw(values: dict[int, float], objective: str) -> str:
    low, high = min(values.values()), max(values.values())
    x_scale = (WIDTH - 2 * MARGIN) / max(values)
    y_scale = (HEIGHT - 2 * MARGIN) / ((high - low) or 1.0)
    circles = "".join(
        f"<circle r='{RADIUS}' cx='{MARGIN + number * x_scale:.1f}' "
        f"cy='{HEIGHT - MARGIN - (value - low) * y_scale:.1f}'>"
        f"<title>trial {number}: {format_number(value)}</title></circle>"
        for number, value in values.items()
    )
    name = f"{get_metric(objective).heading} over the trials, {format_number(low)} to {format_number(high)}"
    return (
        f"<svg width='{WIDTH}' height='{HEIGHT}' fill='currentColor' role='img'>{circles}"
        f"<text x='{MARGIN}' y='{HEIGHT - 2}' font-size='12'>{escape(name)}</text></svg>"
    )
