"""Plot the trials for each pair of objectives, and mark the trials on the front."""

from collections.abc import Collection, Sequence
from itertools import combinations
from typing import Any

import numpy as np

from sweeper.common.format import format_point
from sweeper.common.trials import TrialRecord
from sweeper.pages.chart_style import COLORS
from sweeper.pages.html_page import Chart
from workloads.api.metrics import Metric, get_metric

OTHERS, FRONT = COLORS[7], COLORS[0]
MAX_NUMBERED = 30  # if a front has more points, their trial numbers are not shown
LOGARITHMIC_FROM = 100.0  # minimum ratio of the largest to the smallest value for a log axis


def build_front_chart(records: Sequence[TrialRecord], metrics: Sequence[str], front: Collection[int]) -> Chart:
    """Return a chart of these ranked trials with a figure for each pair of objectives. `front` contains the numbers of
    the trials on the front."""
    is_on_front = np.array([record.number in front for record in records])
    pairs = list(combinations(map(get_metric, metrics), 2))
    figures = [_draw_panel(records, x, y, is_on_front, is_line=len(pairs) == 1) for y, x in pairs]
    return Chart(f"Pareto front of {is_on_front.sum()} of {len(records)} trials", figures)


def _draw_panel(records: Sequence[TrialRecord], x: Metric, y: Metric, is_on_front: np.ndarray, *, is_line: bool) -> Any:
    import plotly.graph_objects as go

    figure = go.Figure()
    xs, ys = (np.array([record.metrics[metric.name] * metric.factor for record in records]) for metric in (x, y))
    texts = np.array([f"trial {record.number}: {format_point(record.params)}" for record in records])
    front = np.flatnonzero(is_on_front)
    front = front[np.argsort(xs[front], kind="stable")]
    mode = "lines+markers" if is_line else "markers"
    mode += "+text" if len(front) <= MAX_NUMBERED else ""
    labels = [str(records[place].number) for place in front.tolist()]
    for name, chosen, style in (
        ("trials", np.flatnonzero(~is_on_front), {"mode": "markers", "marker": {"color": OTHERS}}),
        ("on the front", front, {"mode": mode, "marker": {"color": FRONT, "size": 9}, "text": labels}),
    ):
        style |= {"hovertext": texts[chosen], "textposition": "top center", "line": {"width": 1}}
        figure.add_scatter(x=xs[chosen], y=ys[chosen], name=name, **style)
    for update, metric, values in ((figure.update_xaxes, x, xs), (figure.update_yaxes, y, ys)):
        # A linear axis would hide small values.
        is_wide = values.min() > 0 and values.max() > LOGARITHMIC_FROM * values.min()
        update(title=metric.heading, type="log" if is_wide else "linear", exponentformat="power")
    return figure.update_layout(legend={"orientation": "h", "y": -0.3})
