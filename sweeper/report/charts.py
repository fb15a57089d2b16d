"""The report's pictures, interactive."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from sweeper.common.metrics import LINEAR_BANDS
from sweeper.report import importance, panels
from sweeper.report.best import SPEEDS, BestResult, by_work, complete, kinds, speed_of, varying
from sweeper.report.panels import COLOURS
from sweeper.report.store import Stored

PATTERNS = ["", "/", "."]  # what tells bars of one colour apart, in print too
ROW_PIXELS = 18  # of a bar with its name
MOST_POINTS = 5000
MOST_LINES = 2000  # of parallel coordinates
FEW = 8  # numbers along one of them that are each named
MOST_NAMES = 30  # along one of them
LONGEST_NAME = 24


@dataclass(frozen=True)
class Picture:
    """One figure, or several that stand side by side where there is room. wide: as many pixels as it needs."""

    title: str
    figures: Sequence[go.Figure]
    note: str = ""
    wide: int = 0


def figures(stored: Stored) -> Iterator[Picture]:
    """Where there is enough to draw one."""
    trials = stored.trials
    if not len(trials):
        return
    for work, found in by_work(stored.best_results).items():
        found = sorted(found, key=lambda peak: (peak.device, peak.devices))
        if len(found) > 1:
            yield _platforms(work, found)
        yield from _scaling(work, found, stored.sweeps)
        yield from _parameters(work, found)
    for name, swept in trials.groupby("tag.sweep"):
        for work, own in kinds(swept):
            title = f"{name}, {work}" if work else str(name)
            yield from _heat(title, own)
            yield from _spread(title, own)
            yield from _memory(title, own)
    yield from _timeline(trials)


def _platforms(work: str, found: Sequence[BestResult]) -> Picture:
    """Training in nine panels; other work by its speed."""
    drawn = [_panel(panel, panels.names(found), panels.colours(found)) for panel in panels.panels(found)]
    if len(drawn) > 1:
        return Picture(f"Nine views of {work}", drawn, panels.NOTE)
    return Picture(f"Best of each device: {work}", drawn)


def _panel(panel: panels.Panel, names: Sequence[str], colours: Sequence[str]) -> go.Figure:
    figure = go.Figure()
    for pattern, (name, known) in zip(PATTERNS, panel.shown.items(), strict=False):
        marker = {"color": list(colours), "pattern": {"shape": pattern}, "line": {"width": 1, "color": "#333"}}
        values = [f.value for f in known]
        bars = {"x": values, "y": list(names), "orientation": "h", "error_x": _errors(known)}
        figure.add_bar(**bars, marker=marker, name=name)
    for name, colour, spread in zip(names, colours, panel.spread, strict=False):
        figure.add_box(x=spread[:MOST_POINTS], name=name, marker_color=colour, boxpoints="outliers")
    if panel.empty:
        figure.add_annotation(text="not in the store", showarrow=False, x=0.5, y=0.5, xref="paper", yref="paper")
        figure.update_xaxes(showticklabels=False)
    several = len(panel.shown) > 1
    height = max(320, 160 + ROW_PIXELS * len(names))
    figure.update_layout(title=panel.title, height=height, showlegend=several, legend={"orientation": "h", "y": -0.3})
    figure.update_yaxes(autorange="reversed", automargin=True, type="category")
    return figure.update_xaxes(title=panel.unit, rangemode="tozero")


def _errors(values: Sequence[Any]) -> dict[str, Any] | None:
    if not any(f.known for f in values):
        return None
    return {"array": [f.high - f.value for f in values], "arrayminus": [f.value - f.low for f in values]}


def _scaling(work: str, found: Sequence[BestResult], sweeps: pd.DataFrame) -> Iterator[Picture]:
    """The same work on more devices, beside what as many times the smallest would give and what was foreseen."""
    if found[0].speed != "tokens_per_s":
        return
    figure, assumed = go.Figure(), []
    for n, device in enumerate(dict.fromkeys(peak.device for peak in found)):
        own = sorted((peak for peak in found if peak.device == device), key=lambda peak: peak.devices)
        foreseen, words = _projected(own[0], sweeps)
        assumed += [f"{device}: {words}"] if words else []
        if len(own) > 1 or foreseen:
            _scaled(figure, own, foreseen, COLOURS[n % len(COLOURS)])
    if not figure.data:
        return
    for axis, title, room in ((figure.update_xaxes, "GPUs", 1.5), (figure.update_yaxes, "tokens/s", 1.5)):
        values = [value for line in figure.data for value in (line.x if title == "GPUs" else line.y)]
        ends = [math.log10(min(values) / room), math.log10(max(values) * room)]
        axis(title=title, type="log", range=ends, tickvals=sorted(set(values)) if title == "GPUs" else _steps(*ends))
    note = (
        "Points are the best configuration of so many GPUs with its 95% interval and its share of the ideal (dashed), "
        "the smallest number's times as many; the band is 85 to 95% of that."
    )
    if assumed:
        note += " Dotted is what the cost model foresees of the smallest number's winner on more. Assumed: "
    yield Picture(f"Scaling of {work}", [figure], note + "; ".join(assumed))


def _scaled(figure: go.Figure, own: Sequence[BestResult], foreseen: dict[int, float], colour: str) -> None:
    """One device's lines."""
    first, known = own[0], [peak.figure for peak in own]
    alone = first.figure.value / first.devices
    all_counts = sorted({peak.devices for peak in own} | set(foreseen))
    low, high = ([band * alone * count for count in all_counts] for band in LINEAR_BANDS)
    quiet = {"x": all_counts, "mode": "lines", "showlegend": False, "hoverinfo": "skip"}
    figure.add_scatter(y=low, line={"width": 0}, name="85%", **quiet)
    figure.add_scatter(y=high, line={"width": 0}, fill="tonexty", fillcolor=f"{colour}22", name="95%", **quiet)
    ideal = [alone * count for count in all_counts]
    figure.add_scatter(y=ideal, line={"color": colour, "dash": "dash"}, name="ideal", **quiet)
    if foreseen:
        dotted = {"color": colour, "dash": "dot"}
        style = {"mode": "lines+markers", "marker": {"symbol": "circle-open"}, "name": f"{first.device}, foreseen"}
        figure.add_scatter(x=list(foreseen), y=list(foreseen.values()), line=dotted, **style)
    shares = [f"{peak.figure.value / (alone * peak.devices):.0%}" for peak in own[1:]]
    figure.add_scatter(
        x=[peak.devices for peak in own],
        y=[f.value for f in known],
        error_y=_errors(known),
        text=["", *shares],
        textposition="bottom right",
        mode="lines+markers+text",
        line_color=colour,
        name=first.device,
    )


def _projected(peak: BestResult, sweeps: pd.DataFrame) -> tuple[dict[int, float], str]:
    """What the sweep of this peak foresaw of more devices, by their number, and what that assumes."""
    column = f"tag.projected_{peak.speed}"
    if column not in sweeps:
        return {}, ""
    own = sweeps[(sweeps["tag.sweeper.study"] == peak.trial["tag.sweeper.study"]) & sweeps[column].notna()]
    if own.empty:
        return {}, ""
    plain = json.loads(own[column].iloc[0])
    return {int(count): float(figure) for count, figure in plain.items()}, str(own["tag.projection_assumes"].iloc[0])


def _steps(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten, between two powers of ten."""
    every = (first * 10.0**power for power in range(math.floor(low), math.ceil(high)) for first in (1, 2, 5))
    return [value for value in every if low <= math.log10(value) <= high]


def _parameters(work: str, found: Sequence[BestResult]) -> Iterator[Picture]:
    """All trials over what varies, and which of it mattered."""
    trials = importance.trials_of(found)
    if len(varying(trials)) < 2 or len(trials) < importance.FEWEST_TRIALS:
        return
    drawn = _parallel(trials, found[0].speed)
    most = f"{len(trials)} trials" if len(trials) <= MOST_LINES else f"the {MOST_LINES} fastest of {len(trials)} trials"
    note = f"Lines are {most}, the brighter the faster on their platform. Drag along an axis to keep what passes there."
    yield Picture(f"Parallel coordinates: {work}", [drawn], note, wide=130 * len(drawn.data[0].dimensions))
    if known := importance.importances(trials):
        figure = go.Figure(go.Bar(x=list(known.values()), y=list(known), orientation="h", marker_color=COLOURS[0]))
        figure.update_layout(height=max(320, 160 + ROW_PIXELS * len(known)))
        figure.update_xaxes(title=importance.MEASURE, range=[0, 1]).update_yaxes(autorange="reversed", automargin=True)
        note = (
            "How much of a trial's rank among those of its platform each parameter explains by itself (Kelley's "
            "epsilon squared). It sees no parameters that matter only together, and a sampler that has settled leaves "
            "little to explain. The importances among a sweep's own pictures are Optuna's, another measure, of that "
            "sweep alone."
        )
        yield Picture(f"What mattered: {work}", [figure], note)


def _parallel(trials: pd.DataFrame, speed: str) -> go.Figure:
    trials = trials.sort_values("rank").tail(MOST_LINES)
    platform = {"platform": trials["platform"]} if trials["platform"].nunique() > 1 else {}
    columns = platform | {name: trials[f"param.{name}"] for name in varying(trials)}
    shown = {n: values for n, values in columns.items() if values.nunique() <= MOST_NAMES or _is_number(values)}
    last = {"label": f"{SPEEDS[speed]} per device", "values": trials["each"]}
    line = {"color": trials["rank"], "colorscale": "Cividis"}
    figure = go.Figure(go.Parcoords(line=line, dimensions=[*(_axis(*column) for column in shown.items()), last]))
    return figure.update_layout(margin={"l": 150, "r": 60})


def _axis(name: str, values: pd.Series[Any]) -> dict[str, Any]:
    """Numbers where they are, anything else at whole numbers; few have their names there."""
    if not _is_number(values):
        codes, names = pd.factorize(values.fillna("none"), sort=True)
        ticks = {"tickvals": list(range(len(names))), "ticktext": [_cut(each) for each in names]}
        return {"label": _cut(name), "values": codes, **ticks}
    numbers = pd.to_numeric(values)
    few = {"tickvals": sorted(numbers.unique())} if numbers.nunique() <= FEW else {}
    return {"label": _cut(name), "values": numbers, **few}


def _is_number(values: pd.Series[Any]) -> bool:
    return bool(pd.to_numeric(values, errors="coerce").notna().all())


def _cut(name: str) -> str:
    return name if len(name) <= LONGEST_NAME else name[: LONGEST_NAME - 1] + "…"


def _numbers(trials: pd.DataFrame) -> list[str]:
    """Parameters that vary and are numbers."""
    return [name for name in varying(trials) if _is_number(trials[f"param.{name}"])]


# Of training, what a map of its speed is drawn of beside it; all of one kind of work, so of one order in tokens/s.
BESIDE_TOKENS = {"tflops": "TFLOP/s", "mfu": "MFU %", "hfu": "HFU %"}


def _heat(name: str, trials: pd.DataFrame) -> Iterator[Picture]:
    """The best over the first two numbers that vary; what cannot work is marked so. Where mostly other cells were tried
    than their grid has, each trial in its place."""
    rows, numbers = complete(trials), _numbers(trials)
    speed = speed_of(rows)
    if speed is None or len(numbers) < 2:
        return
    x, y = numbers[0], numbers[1]
    grid = trials.assign(x=pd.to_numeric(trials[f"param.{x}"]), y=pd.to_numeric(trials[f"param.{y}"]))
    shape = grid.x.nunique(), grid.y.nunique()
    if min(shape) < 2:
        return
    if shape[0] * shape[1] > min(MOST_POINTS, 4 * len(grid)):
        yield Picture(f"{name}: {SPEEDS[speed]} over {x} and {y}", [_places(complete(grid), speed, x, y)])
        return
    beside = BESIDE_TOKENS if speed == "tokens_per_s" else {}
    measured = {m: label for m, label in beside.items() if f"metric.{m}" in rows and rows[f"metric.{m}"].notna().any()}
    shown = {speed: SPEEDS[speed]} | measured
    maps = [_map(grid, metric, label, x, y) for metric, label in shown.items()]
    yield Picture(f"{name}: best {', '.join(shown.values())} over {x} and {y}", maps)


def _places(grid: pd.DataFrame, speed: str, x: str, y: str) -> go.Figure:
    """Each trial at its place, coloured by its speed: the fastest on top of the others."""
    grid = grid.sort_values(f"metric.{speed}").tail(MOST_POINTS)
    values = grid[f"metric.{speed}"]
    scale = {"color": values, "colorscale": "Viridis", "colorbar": {"title": SPEEDS[speed]}, "size": 11}
    words = {"text": [f"{run}: {_cell(value)} {SPEEDS[speed]}" for run, value in zip(grid["run"], values, strict=True)]}
    figure = go.Figure(go.Scatter(x=grid.x, y=grid.y, mode="markers", marker=scale, **words))
    return figure.update_xaxes(title=x).update_yaxes(title=y)


def _map(grid: pd.DataFrame, metric: str, label: str, x: str, y: str) -> go.Figure:
    """The most of a metric in each cell of grid.x and grid.y."""
    best = grid.pivot_table(index="y", columns="x", values=f"metric.{metric}", aggfunc="max", dropna=False)
    best = best * (100 if label.endswith("%") else 1)
    figure = go.Figure(
        go.Heatmap(
            z=best.values,
            x=[f"{value:g}" for value in best.columns],
            y=[f"{value:g}" for value in best.index],
            colorscale="Viridis",
            colorbar={"title": label},
            text=[[_cell(value) for value in row] for row in best.values],
            texttemplate="%{text}" if best.size <= 100 else None,
        )
    )
    worked = complete(grid).set_index(["x", "y"]).index
    no = grid[(grid["tag.outcome"] == "infeasible") & ~grid.set_index(["x", "y"]).index.isin(worked)]
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
    return figure


def _cell(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.4g}" if value < 1e4 else f"{value:,.0f}"


def _spread(name: str, trials: pd.DataFrame) -> Iterator[Picture]:
    """How a sweep's trials came out, in the order in which they ran."""
    rows, speed = complete(trials), speed_of(complete(trials))
    if speed is None or len(rows) < 5:
        return
    rows = rows[rows[f"metric.{speed}"].notna()].sort_values("start").tail(MOST_POINTS)
    numbers = pd.to_numeric(rows["tag.sweeper.trial"])
    figure = _trials(numbers, rows, speed, numbers, rows[f"metric.{speed}"].cummax(), "best so far")
    figure.update_xaxes(title="trial")
    yield Picture(f"{name}: trials", [figure])


def _memory(name: str, trials: pd.DataFrame) -> Iterator[Picture]:
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
    yield Picture(f"{name}: speed against memory", [figure])


def _trials(
    x: pd.Series[Any], rows: pd.DataFrame, speed: str, best_x: pd.Series[Any], best_y: pd.Series[Any], best: str
) -> go.Figure:
    """Each trial's speed over x, and a line of steps for the best."""
    figure = go.Figure()
    marker, line = {"color": COLOURS[0]}, {"color": COLOURS[5], "shape": "hv"}
    figure.add_scatter(x=x, y=rows[f"metric.{speed}"], mode="markers", marker=marker, text=rows["run"], name="trials")
    figure.add_scatter(x=best_x, y=best_y, mode="lines", line=line, name=best)
    return figure.update_yaxes(title=SPEEDS[speed], rangemode="tozero")


def _timeline(trials: pd.DataFrame) -> Iterator[Picture]:
    """Which device did what when."""
    if "tag.node" not in trials:
        return
    rows = trials[trials["end"].notna() & trials["tag.node"].notna()].tail(MOST_POINTS)
    if not len(rows):
        return
    gpus = rows["tag.gpus"].fillna("") if "tag.gpus" in rows else pd.Series("", index=rows.index)
    places = rows["tag.node"] + gpus.map(lambda gpu: f" GPU {gpu}" if gpu else "")
    figure = go.Figure()
    for n, (outcome, own) in enumerate(rows.groupby("tag.outcome")):
        figure.add_bar(
            base=own["start"],
            x=(own["end"] - own["start"]).dt.total_seconds() * 1000,
            y=places[own.index],
            orientation="h",
            name=str(outcome),
            # A trial of minutes in a store of months is narrower than a pixel: its edge is not.
            marker={"color": COLOURS[n % 8], "line": {"width": 1.5, "color": COLOURS[n % 8]}},
            text=own["run"],
            textposition="none",
        )
    last = rows[rows["tag.sweeper.study"] == rows.sort_values("start")["tag.sweeper.study"].iloc[-1]]
    figure.update_xaxes(type="date", title="UTC", range=[last["start"].min(), last["end"].max()])
    figure.update_layout(barmode="overlay", showlegend=True)
    note = "Of the last sweep; a double click shows all." if len(last) < len(rows) else ""
    yield Picture("Which device did what when", [figure], note)
