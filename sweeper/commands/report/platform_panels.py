"""Compare training on several platforms in nine panels of an interactive chart.

A platform is a given number of devices of one model. All panels show one kind of work, so values are comparable.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import plotly.graph_objects as go

from sweeper.commands.report.notes import NOTES
from sweeper.metrics.intervals import Interval
from sweeper.pages.chart_style import COLORS, GRAY, bar_chart_height_px, build_error_bars
from sweeper.pages.html_page import Chart
from sweeper.results.ranking import BestResult, read_value

VENDORS = re.compile(r"\b(NVIDIA|AMD Instinct|AMD) ")
UNKNOWN = Interval(math.nan)
PATTERNS = ["", "/", "."]  # patterns that distinguish bars of the same color, even in print
MAX_POINTS = 5000


@dataclass(frozen=True)
class Panel:
    title: str
    unit: str
    series: dict[str, list[Interval]] = field(default_factory=dict)  # by name: the bars of all platforms
    spread: list[list[float]] = field(default_factory=list)  # all values of each platform, for a box plot


def list_names(results: Sequence[BestResult]) -> list[str]:
    """Return the short names of the platforms, without vendor names."""
    return [VENDORS.sub("", result.platform) for result in results]


def build_panels(results: Sequence[BestResult]) -> list[Panel]:
    """Return nine panels for results ranked by tokens/s, or one panel for other work."""
    estimates = [result.estimate for result in results]
    if results[0].objective.metric != "tokens_per_s":
        return [Panel("", results[0].unit, {"": estimates})]
    rank = "process" if results[0].is_cpu else "GPU"
    flops = [read_value(result.trial, "tflops") for result in results]
    flops_per_gpu = [value.scaled(1 / result.devices) for value, result in zip(flops, results, strict=True)]
    utilizations = {
        metric.upper(): [Interval(100 * result.get_metric(metric)) for result in results] for metric in ("mfu", "hfu")
    }
    ceilings = {"achieved": flops_per_gpu}
    for name, share in (("matmul ceiling", "mamf_utilization"), ("peak", "mfu")):
        shares = [result.get_metric(share) or math.nan for result in results]  # the fractions reached of this ceiling
        ceilings[name] = [Interval(rate.value / share) for rate, share in zip(flops_per_gpu, shares, strict=True)]
    gains, spread = [], []
    for result in results:
        tokens = result.trials["metric.tokens_per_s"]
        spread.append(list(tokens / result.devices))
        # For a single configuration, a gain over the median is meaningless.
        gains.append(Interval(result.estimate.value / float(tokens.median())) if len(tokens) > 1 else UNKNOWN)
    return [
        Panel("Tokens", "tokens/s", {"": estimates}),
        Panel("Computation", "TFLOP/s", {"": flops}),
        Panel("Utilization of the peak", "%", utilizations),
        Panel(f"Tokens per {rank}", f"tokens/s per {rank}", {"": [result.per_device for result in results]}),
        Panel(f"Computation per {rank}", f"TFLOP/s per {rank}", {"": flops_per_gpu}),
        Panel("Achieved rate and ceilings", f"TFLOP/s per {rank}", ceilings),
        Panel("Step time", "ms", {"": [Interval(result.get_metric("step_time_ms")) for result in results]}),
        Panel("All configurations", f"tokens/s per {rank}", spread=spread),
        Panel("Best over median configuration", "times", {"": gains}),
    ]


def build_chart(work: str, results: Sequence[BestResult]) -> Chart:
    devices = list(dict.fromkeys(result.device for result in results))
    colors = [COLORS[devices.index(result.device) % len(COLORS)] for result in results]
    figures = [_build_figure(panel, list_names(results), colors) for panel in build_panels(results)]
    if len(figures) > 1:
        return Chart(f"Nine views of {work}", figures, NOTES["platforms"])
    return Chart(f"Best of each device: {work}", figures)


def _build_figure(panel: Panel, names: Sequence[str], colors: Sequence[str]) -> go.Figure:
    figure = go.Figure()
    known = {name: row for name, row in panel.series.items() if not all(math.isnan(item.value) for item in row)}
    for pattern, (series, values) in zip(PATTERNS, known.items(), strict=False):
        # Add one trace per color, because plotly logs console warnings for patterned bars with a list of colors.
        for n, color in enumerate(dict.fromkeys(colors)):
            bars = [(name, value) for name, of, value in zip(names, colors, values, strict=True) if of == color]
            labels = {"name": series, "offsetgroup": series, "legendgroup": series, "showlegend": not n}
            figure.add_bar(
                x=[value.value for _, value in bars],
                y=[name for name, _ in bars],
                error_x=build_error_bars([value for _, value in bars]),
                marker={"color": color, "pattern": {"shape": pattern}, "line": {"width": 1, "color": GRAY}},
                orientation="h",
                **labels,
            )
    for name, color, spread in zip(names, colors, panel.spread, strict=False):
        figure.add_box(x=spread[:MAX_POINTS], name=name, marker_color=color, boxpoints="outliers")
    if not figure.data:
        figure.add_annotation(text="not in the store", showarrow=False, x=0.5, y=0.5, xref="paper", yref="paper")
        figure.update_xaxes(showticklabels=False)
    figure.update_layout(title=panel.title, height=bar_chart_height_px(len(names)), barmode="group")
    figure.update_layout(showlegend=len(known) > 1, legend={"orientation": "h", "y": -0.3})
    figure.update_yaxes(autorange="reversed", automargin=True, type="category", categoryarray=list(names))
    return figure.update_xaxes(title=panel.unit, rangemode="tozero")
