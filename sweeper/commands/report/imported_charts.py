"""The pictures of imported results: the fastest of each kind of work, and the tables of a file over two parameters."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import pandas as pd
import plotly.graph_objects as go

from sweeper.commands.report.charts import build_heatmaps
from sweeper.commands.report.platform_panels import VENDORS
from sweeper.pages.chart_style import COLORS, bar_chart_height_px, cut_name
from sweeper.pages.html_page import Chart
from sweeper.results.imported import Imported, list_results, select_fastest

MIN_RESULTS = 6  # of a file at one kind of work, for a heatmap
MAX_FIGURES = 24  # side by side
MAX_NAME_LENGTH = 30  # of a result beside its bar
BUDGETS = ("param.host_gib", "param.device_gib")  # what ml_dataflow's results are tables over
NOTE = (
    "Bars are tokens/s of one device, derived again from the file's tokens and steps; a cross is what the tool claims. "
    "Each figure is one kind of work; a model that a file does not name is compared with nothing. Results that "
    "contradict themselves are not drawn."
)


def build_charts(runs: pd.DataFrame) -> Iterator[Chart]:
    """Yield the charts of the imported results that have tokens/s and do not contradict themselves."""
    if not len(runs):
        return
    results = [result for result in list_results(runs) if not result.contradictions]
    works: dict[str, list[Imported]] = {}
    for result in select_fastest(results):
        if not math.isnan(result.rate_per_device):
            model, length, _, dtype, *_ = result.work
            parts = [model or result.name, dtype, f"{length} tokens a sequence" if length else ""]
            works.setdefault(" ".join(filter(None, parts)), []).append(result)
    figures = [_build_bars(work, of_work) for work, of_work in works.items()]
    if figures:
        left_out = f" {len(figures) - MAX_FIGURES} more are not drawn." if len(figures) > MAX_FIGURES else ""
        yield Chart("Imported results: tokens/s of one device", figures[:MAX_FIGURES], NOTE + left_out)
    is_drawn = {result.run["run_id"] for result in results}
    # What did not work is drawn too: a budget at which nothing fits.
    yield from _build_heatmaps(runs[runs["run_id"].isin(is_drawn) | (runs["tag.outcome"] == "infeasible")])


def _build_bars(work: str, results: Sequence[Imported]) -> go.Figure:
    names, claims = [], {}
    for result in results:
        *_, device, devices = result.work
        name = f"{devices} x {VENDORS.sub('', device) or 'unknown'}, {cut_name(result.name, MAX_NAME_LENGTH)}"
        names.append(name)
        claims[name] = result.claim_per_device("tokens_per_s")
    claims = {name: claim for name, claim in claims.items() if not math.isnan(claim)}
    rates = [result.rate_per_device for result in results]
    figure = go.Figure(go.Bar(x=rates, y=names, orientation="h", marker_color=COLORS[0], name="derived"))
    if claims:
        marker = {"symbol": "x", "size": 10, "color": COLORS[5]}
        figure.add_scatter(x=list(claims.values()), y=list(claims), mode="markers", marker=marker, name="claimed")
    figure.update_layout(title=work, height=bar_chart_height_px(len(results)), showlegend=False)
    figure.update_yaxes(autorange="reversed", automargin=True, type="category")
    return figure.update_xaxes(title="tokens/s per device", rangemode="tozero")


def _build_heatmaps(runs: pd.DataFrame) -> Iterator[Chart]:
    """Yield a chart for each file with enough results: tokens/s over two parameters, a figure for each kind of work."""
    if "metric.tokens_per_s" not in runs:
        return
    for _, of_file in runs.groupby("parent", sort=False):
        figures = []
        lengths = of_file.get("param.sequence_length", pd.Series("", index=of_file.index)).fillna("")
        for length in sorted(set(lengths), key=lambda text: float(text or 0)):
            of_length = of_file[lengths == length].dropna(axis="columns", how="all")
            if all(name in of_length and of_length[name].nunique() > 1 for name in BUDGETS):
                # The tool chose the other parameters for each budget.
                chosen = [name for name in of_length if str(name).startswith("param.") and name not in BUDGETS]
                of_length = of_length.drop(columns=chosen)
            if len(of_length) < MIN_RESULTS or "metric.tokens_per_s" not in of_length:
                continue
            for chart in build_heatmaps("", of_length):
                figures.append(chart.figures[0].update_layout(title=f"{length} tokens a sequence" if length else ""))
        if figures:
            name = Path(str(of_file["run"].iloc[0]).partition(" line ")[0]).name
            yield Chart(f"{name}, imported: tokens/s", figures[:MAX_FIGURES], "A cross is where nothing worked.")
