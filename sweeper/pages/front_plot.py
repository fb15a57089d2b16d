"""Plot the trials for each pair of objectives, and mark the trials on the front."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Literal

import numpy as np

from sweeper.common.format import format_point
from sweeper.common.trials import TrialRecord
from sweeper.pages.chart_style import COLORS
from workloads.api.metrics import get_metric

OTHERS, FRONT = COLORS[7], COLORS[0]
MAX_NUMBERED = 30  # if a front has more points, their trial numbers are not shown
LOGARITHMIC_FROM = 100.0  # minimum ratio of the largest to the smallest value for a log axis


@dataclass(frozen=True)
class FrontPlot:
    """The data of a front plot. `values` has a row for each trial and a column for each objective in `labels`."""

    labels: Sequence[str]
    values: np.ndarray
    numbers: Sequence[int]
    texts: Sequence[str]
    is_on_front: np.ndarray

    @property
    def title(self) -> str:
        return f"Pareto front of {int(self.is_on_front.sum())} of {len(self.numbers)} trials"

    def axis_type(self, objective: int) -> Literal["log", "linear"]:
        """Return the scale of an objective's axis, which is logarithmic if a linear axis would hide small values."""
        values = self.values[:, objective]
        return "log" if values.min() > 0 and values.max() > LOGARITHMIC_FROM * values.min() else "linear"

    def panels(self) -> Iterator[tuple[int, int, Sequence[int]]]:
        """Yield for each panel the objectives on the x and y axes, and the trials on the front sorted by x."""
        for y, x in combinations(range(len(self.labels)), 2):  # the leading objective is on the y axis
            front = np.flatnonzero(self.is_on_front)
            yield x, y, front[np.argsort(self.values[front, x], kind="stable")].tolist()


def build_front_plot(records: Sequence[TrialRecord], metrics: Sequence[str], front: Collection[int]) -> FrontPlot:
    """Return the plot data of these ranked trials. `front` contains the numbers of the trials on the front."""
    shown = [get_metric(name) for name in metrics]
    return FrontPlot(
        labels=[metric.heading for metric in shown],
        values=np.array([[record.metrics[metric.name] * metric.factor for metric in shown] for record in records]),
        numbers=[record.number for record in records],
        texts=[format_point(record.params) for record in records],
        is_on_front=np.array([record.number in front for record in records]),
    )


def build_panel_figures(plot: FrontPlot) -> list[Any]:
    """Return a Plotly figure for each panel. A page places the panels side by side if there is room."""
    return [_draw_panel(plot, *panel) for panel in plot.panels()]


def _draw_panel(plot: FrontPlot, x: int, y: int, front: Sequence[int]) -> Any:
    import plotly.graph_objects as go

    figure = go.Figure()
    texts = np.array([f"trial {number}: {text}" for number, text in zip(plot.numbers, plot.texts, strict=True)])
    labels = [str(plot.numbers[place]) for place in front]
    mode = "lines+markers" if len(plot.labels) == 2 else "markers"
    mode += "+text" if len(front) <= MAX_NUMBERED else ""
    others = np.flatnonzero(~plot.is_on_front).tolist()
    for name, chosen, style in (
        ("trials", others, {"mode": "markers", "marker": {"color": OTHERS}}),
        ("on the front", front, {"mode": mode, "marker": {"color": FRONT, "size": 9}, "text": labels}),
    ):
        xs, ys = plot.values[chosen][:, [x, y]].T
        style |= {"hovertext": texts[chosen], "textposition": "top center", "line": {"width": 1}}
        figure.add_scatter(x=xs, y=ys, name=name, **style)
    figure.update_xaxes(title=plot.labels[x], type=plot.axis_type(x), exponentformat="power")
    figure.update_yaxes(title=plot.labels[y], type=plot.axis_type(y), exponentformat="power")
    return figure.update_layout(legend={"orientation": "h", "y": -0.3})
