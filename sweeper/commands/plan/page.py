"""Build an HTML page of a plan: the text, and charts of the step, the memory, the pipeline and scaling."""

from collections.abc import Mapping
from dataclasses import replace

import plotly.graph_objects as go

from sweeper.commands.plan.answer import Answer, memory_parts, tokens_of_a_day
from sweeper.commands.plan.text import differences_table, headline, layouts_table, list_sections
from sweeper.common.format import round_to_band, show_range
from sweeper.pages import html_page
from sweeper.pages.chart_style import COLORS, GRAY, add_band, bar_chart_height_px
from sweeper.pages.html_page import Chart, Table
from workloads.api.contract import BandEnds
from workloads.estimator.estimate import find_band
from workloads.estimator.pipeline import build_timeline
from workloads.estimator.search import Candidate, bound_gib
from workloads.estimator.step import rank_seconds
from workloads.layouts.layout import describe
from workloads.tables import read_toml

MAX_BARS = 4
DRAWN_MICROBATCHES = 2  # in multiples of the pipeline degree; later micro-batches repeat the pattern
COLORS_OF: Mapping[str, Mapping[str, str]] = read_toml(__file__, "colors.toml")
CHUNK_SHADES = 5  # number of shades for the stages of a rank
Bars = Mapping[str, Mapping[str, float]]  # each bar's description, and the bar's parts by name


def build_page(answer: Answer, scaling: Mapping[int, Candidate]) -> str:
    """Return a plan as HTML. `scaling` maps each number of GPUs to the fastest layout."""
    cluster, ends = answer.problem.cluster, answer.band.ends
    sections: list[Chart | Table] = [
        draw_bars("Where the time goes", list_steps(answer), COLORS_OF["step"], "s", ends.half_width),
        _draw_memory(answer),
    ]
    if answer.best.layout.pp > 1:
        sections.append(draw_pipeline(answer))
    if len(scaling) > 1:
        rates = {gpus: candidate.estimate.tokens_per_s_per_gpu for gpus, candidate in scaling.items()}
        sections += [Chart("Scaling", [draw_scaling(rates, ends)]), _tabulate_scaling(scaling, ends)]
    if answer.faster is not None:
        sections.append(Table("The given layout and the fastest", *differences_table(answer)))
    sections.append(Table("The fastest layouts", *layouts_table(answer)))
    subtitle = f"Plan: {answer.request.model} on {cluster.gpus:,} x {cluster.device.name}"
    terms = [(name, lines) for name, lines in list_sections(answer) if name != "answer"]  # shown as the title
    return html_page.build_page(headline(answer), sections, subtitle, terms)


def list_steps(answer: Answer) -> Bars:
    """Return the fastest layouts' steps, one per set of degrees. Any layout faster than the given one comes first."""
    by_division: dict[tuple[object, ...], Candidate] = {}
    for candidate in [*filter(None, [answer.faster]), *answer.result.best]:
        layout = candidate.layout
        by_division.setdefault((layout.dp, layout.tp, layout.cp, layout.pp, layout.ep, layout.checkpointing), candidate)
    steps = {describe(shown.layout): shown.estimate.step for shown in list(by_division.values())[:MAX_BARS]}
    return {f"{show_range(step.total_s, answer.band.ends)} s: {name}": vars(step) for name, step in steps.items()}


def _draw_memory(answer: Answer) -> Chart:
    problem, stages = answer.problem, answer.best.estimate.stages
    most_gib = problem.cluster.usable_gib
    ranks = {0: "first", len(stages) - 1: "last"} if len(stages) > 1 else {0: "only"}
    bars = {}
    for rank, name in ({stages.index(answer.best.estimate.memory): "fullest"} | ranks).items():
        needed_gib = bound_gib(stages[rank], problem.job, problem.cluster)
        text = f"{name} pipeline rank ({rank}): up to {needed_gib:.0f} of {most_gib:.0f} GiB usable"
        bars[text] = memory_parts(stages[rank], problem)
    above = find_band(problem.job, problem.cluster, "memory").ends.above
    chart = draw_bars("Where the memory goes", bars, COLORS_OF["memory"], "GiB", above)
    chart.figures[0].add_vline(x=most_gib, line={"color": GRAY, "width": 2})
    return chart


def draw_bars(title: str, bars: Bars, colors: Mapping[str, str], unit: str, half_width: float) -> Chart:
    """Return a chart of stacked bars, described in the note. The band's `half_width` determines the digits."""
    figure, places = go.Figure(), [str(place) for place in range(1, len(bars) + 1)]
    for name, color in colors.items():
        values = [parts.get(name, 0.0) for parts in bars.values()]
        if any(values):
            texts = [f"{name}: {round_to_band(value, half_width)} {unit}" for value in values]
            labels = {"name": name, "hovertext": texts, "hoverinfo": "text"}
            figure.add_bar(x=values, y=places, orientation="h", marker_color=color, **labels)
    height_px = 140 + 50 * len(bars) + 20 * len(figure.data)  # the legend has one column on a phone
    figure.update_layout(barmode="stack", bargap=0.4, height=height_px, showlegend=True, legend_traceorder="normal")
    figure.update_yaxes(type="category", autorange="reversed").update_xaxes(ticksuffix=f" {unit}", rangemode="tozero")
    note = "\n".join(f"{place}: {text}" for place, text in zip(places, bars, strict=True))
    return Chart(title, [figure], note)


def draw_pipeline(answer: Answer) -> Chart:
    """Return a chart with one row per pipeline rank and with passes colored by kind."""
    layout = answer.best.layout
    job = replace(answer.problem.job, layout=layout)
    drawn = min(layout.microbatches, DRAWN_MICROBATCHES * layout.pp)
    operations = build_timeline(layout, rank_seconds(job, answer.problem.cluster), drawn)
    figure = go.Figure()
    for kind, color in COLORS_OF["pass"].items():
        name, own = kind.replace("_", " "), [item for item in operations if item.action.kind == kind]
        shades = [1 - 0.7 * (item.action.chunk % CHUNK_SHADES) / CHUNK_SHADES for item in own]
        figure.add_bar(
            x=[item.stop_s - item.start_s for item in own],
            base=[item.start_s for item in own],
            y=[item.rank for item in own],
            orientation="h",
            marker={"color": color, "opacity": shades, "line": {"width": 0.3, "color": "#fff"}},
            name=name,
            visible=bool(own),
            hovertext=[f"micro-batch {i.action.microbatch}, stage {i.action.chunk} of the rank, {name}" for i in own],
        )
    figure.update_layout(barmode="overlay", bargap=0.1, height=bar_chart_height_px(layout.pp))
    figure.update_yaxes(title="rank", autorange="reversed").update_xaxes(title="s")
    rest = "" if drawn == layout.microbatches else f" of {layout.microbatches:,}; the others repeat the middle"
    stages = "; shades are the stages of a rank" if layout.stages_per_rank > 1 else ""
    note = f"Schedule {layout.schedule}, {drawn} micro-batches{rest}{stages}. Sends between ranks are not drawn."
    return Chart("The pipeline", [figure], note)


def _tabulate_scaling(scaling: Mapping[int, Candidate], ends: BandEnds) -> Table:
    rows = []
    for gpus, candidate in scaling.items():
        estimate = candidate.estimate
        values = (estimate.step.total_s, estimate.tokens_per_s_per_gpu, tokens_of_a_day(estimate) / 1e9)
        rounded = [round_to_band(value, ends.half_width) for value in values]
        rows.append([f"{gpus:,}", f"{estimate.tokens / 1e6:.3g}", *rounded, describe(candidate.layout)])
    heading = ["GPUs", "M tokens a step", "step s", "tokens/s per GPU", "B tokens a day", "fastest layout"]
    note = "The fastest layout of each number of GPUs that the model fits into, with the band of published runs."
    if len({candidate.estimate.tokens for candidate in scaling.values()}) > 1:
        note += " The batch grows with the GPUs where each needs a sequence: global_batch= sets one for all."
    return Table("The fastest layout of each number of GPUs", heading, rows, note)


def draw_scaling(rates: Mapping[int, float], ends: BandEnds) -> go.Figure:
    """Plot tokens/s per GPU, with the error band, against the number of GPUs on a logarithmic axis."""
    figure, counts, speeds = go.Figure(), list(rates), list(rates.values())
    add_band(figure, counts, speeds, (1 - ends.below, 1 + ends.above), COLORS[0])
    figure.add_scatter(x=counts, y=speeds, mode="lines+markers", line_color=COLORS[0], showlegend=False)
    figure.update_xaxes(title="GPUs", type="log", tickvals=counts[::-2])
    return figure.update_yaxes(title="tokens/s per GPU", rangemode="tozero")
