"""The report's pictures, interactive, in colours that the colour-blind can tell apart (Okabe and Ito 2008)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from sweeper.report.peaks import SPEEDS, Peak, complete, speed_of, varying
from sweeper.report.store import Stored

COLOURS = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000"]
MOST_POINTS = 5000


def figures(stored: Stored) -> Iterator[tuple[str, go.Figure]]:
    """Each with its title, where there is enough to draw one."""
    trials = stored.trials
    if not len(trials):
        return
    yield from _best(stored.peaks)
    for name, own in trials.groupby("tag.sweep"):
        yield from _heat(str(name), own)
        yield from _spread(str(name), own)
        yield from _memory(str(name), own)
    yield from _timeline(trials)


def _best(found: Sequence[Peak]) -> Iterator[tuple[str, go.Figure]]:
    """Bars for each kind of work, only of those with more than one device to show."""
    by_work: dict[str, list[Peak]] = {}
    for peak in found:
        words = " ".join(str(value) for value in peak.work.values())
        by_work.setdefault(f"{words}|{peak.speed}", []).append(peak)
    for key, group in by_work.items():
        words, speed = key.split("|")
        if len(group) < 2:
            continue
        figure = go.Figure()
        for n, peak in enumerate(group):
            f = peak.figure
            error = {"array": [f.high - f.value], "arrayminus": [f.value - f.low]} if f.known else None
            label = f"{peak.devices} x {peak.device}" if peak.devices > 1 else peak.device
            figure.add_bar(x=[label], y=[f.value], error_y=error, marker_color=COLOURS[n % 8], name=label)
        figure.update_yaxes(title=SPEEDS[speed], rangemode="tozero")
        figure.update_layout(showlegend=False)
        yield f"Best of each device: {words}", figure


def _numbers(trials: pd.DataFrame) -> list[str]:
    """Parameters that vary and are numbers."""
    return [name for name in varying(trials) if pd.to_numeric(trials[f"param.{name}"], errors="coerce").notna().all()]


def _heat(name: str, trials: pd.DataFrame) -> Iterator[tuple[str, go.Figure]]:
    """The best over the first two numbers that vary; what cannot work is marked so."""
    speed, numbers = speed_of(complete(trials)), _numbers(trials)
    if speed is None or len(numbers) < 2:
        return
    x, y = numbers[0], numbers[1]
    grid = trials.assign(
        x=pd.to_numeric(trials[f"param.{x}"]), y=pd.to_numeric(trials[f"param.{y}"]), v=trials[f"metric.{speed}"]
    )
    best = grid.pivot_table(index="y", columns="x", values="v", aggfunc="max", dropna=False)
    if best.shape[0] < 2 or best.shape[1] < 2 or best.size > MOST_POINTS:
        return
    figure = go.Figure(
        go.Heatmap(
            z=best.values,
            x=[f"{value:g}" for value in best.columns],
            y=[f"{value:g}" for value in best.index],
            colorscale="Viridis",
            colorbar={"title": SPEEDS[speed]},
            text=[[f"{value:.4g}" if value < 1e4 else f"{value:,.0f}" for value in row] for row in best.values],
            texttemplate="%{text}" if best.size <= 100 else None,
        )
    )
    no = grid[grid["tag.outcome"] == "infeasible"]
    figure.add_scatter(
        x=[f"{value:g}" for value in no.x],
        y=[f"{value:g}" for value in no.y],
        mode="markers",
        marker={"symbol": "x", "size": 12, "color": "#888"},
        name="infeasible",
        text=no.get("tag.reason"),
    )
    figure.update_xaxes(title=x, type="category", categoryarray=[f"{v:g}" for v in sorted(grid.x.unique())])
    figure.update_yaxes(title=y, type="category", categoryarray=[f"{v:g}" for v in sorted(grid.y.unique())])
    yield f"{name}: best {SPEEDS[speed]} over {x} and {y}", figure


def _spread(name: str, trials: pd.DataFrame) -> Iterator[tuple[str, go.Figure]]:
    """How a sweep's trials came out, in the order in which they ran."""
    rows, speed = complete(trials), speed_of(complete(trials))
    if speed is None or len(rows) < 5:
        return
    rows = rows[rows[f"metric.{speed}"].notna()].sort_values("start").tail(MOST_POINTS)
    numbers = pd.to_numeric(rows["tag.sweeper.trial"])
    figure = _trials(numbers, rows, speed, numbers, rows[f"metric.{speed}"].cummax(), "best so far")
    figure.update_xaxes(title="trial")
    yield f"{name}: trials", figure


def _memory(name: str, trials: pd.DataFrame) -> Iterator[tuple[str, go.Figure]]:
    """Speed against memory, and what is better in both than all others."""
    rows, speed = complete(trials), speed_of(complete(trials))
    column = next((c for c in ("metric.peak_device_gib", "metric.peak_memory_gib") if c in rows), None)
    if speed is None or column is None:
        return
    rows = rows[rows[column].notna() & rows[f"metric.{speed}"].notna()].sort_values(column)
    if len(rows) < 3:
        return
    front = rows[rows[f"metric.{speed}"] >= rows[f"metric.{speed}"].cummax()]
    figure = _trials(rows[column], rows, speed, front[column], front[f"metric.{speed}"], "best of both")
    figure.update_xaxes(title="memory of one device, GiB")
    yield f"{name}: speed against memory", figure


def _trials(
    x: pd.Series[Any], rows: pd.DataFrame, speed: str, best_x: pd.Series[Any], best_y: pd.Series[Any], best: str
) -> go.Figure:
    """Each trial's speed over x, and a line of steps for the best."""
    figure = go.Figure()
    marker, line = {"color": COLOURS[0]}, {"color": COLOURS[5], "shape": "hv"}
    figure.add_scatter(x=x, y=rows[f"metric.{speed}"], mode="markers", marker=marker, text=rows["run"], name="trials")
    figure.add_scatter(x=best_x, y=best_y, mode="lines", line=line, name=best)
    return figure.update_yaxes(title=SPEEDS[speed], rangemode="tozero")


def _timeline(trials: pd.DataFrame) -> Iterator[tuple[str, go.Figure]]:
    """Which device did what when."""
    rows = trials[trials["end"].notna()].tail(MOST_POINTS)
    if not len(rows):
        return
    gpus = rows["tag.gpus"].fillna("") if "tag.gpus" in rows else pd.Series("", index=rows.index)
    places = rows["tag.node"].fillna("unknown") + gpus.map(lambda gpu: f" GPU {gpu}" if gpu else "")
    figure = go.Figure()
    for n, (outcome, own) in enumerate(rows.groupby("tag.outcome")):
        figure.add_bar(
            base=own["start"],
            x=(own["end"] - own["start"]).dt.total_seconds() * 1000,
            y=places[own.index],
            orientation="h",
            name=str(outcome),
            marker_color=COLOURS[n % 8],
            text=own["run"],
            textposition="none",
        )
    figure.update_xaxes(type="date", title="UTC").update_layout(barmode="overlay")
    yield "Which device did what when", figure
