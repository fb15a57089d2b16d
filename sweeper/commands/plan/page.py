"""An answer as one HTML file that opens offline and prints: the text of the plan, and its pictures as inline SVG.

Positions in pictures are in percent, so that they fit any width and text keeps its size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from html import escape
from importlib.resources import files

from sweeper.commands.plan.answer import Answer, tokens_of_a_day
from sweeper.commands.plan.text import differences_table, layouts_table, list_sections
from sweeper.common.format import round_to_band
from workloads.estimator.estimate import find_band
from workloads.estimator.pipeline import Kind, build_timeline
from workloads.estimator.search import USABLE_MEMORY, Candidate
from workloads.estimator.step import rank_seconds
from workloads.estimator.words import describe

STYLE = """
th { cursor: default; position: static; } th:hover { text-decoration: none; }
svg { display: block; width: 100%; overflow: visible; print-color-adjust: exact; -webkit-print-color-adjust: exact; }
svg text { fill: var(--ink); font: 12px system-ui, sans-serif; }
.bar { background: var(--soft); } .pass { stroke: var(--paper); stroke-width: .5px; }
.label { margin: .6rem 0 .15rem; font-size: .9rem; } .legend { display: flex; flex-wrap: wrap; gap: .1rem 1rem; }
.legend { font-size: .85rem; } .legend i { display: inline-block; width: .8em; height: .8em; margin-right: .35em;
  print-color-adjust: exact; -webkit-print-color-adjust: exact; }
.rank { display: flex; align-items: center; gap: .4rem; margin: 2px 0; font-size: .8rem; }
.rank > span:first-child { min-width: 2.2rem; text-align: right; } .rank .end { margin-left: auto; }
.plan dt { font-weight: 600; } .plan dd { margin: 0 0 .3rem 1rem; overflow-wrap: anywhere; }
.scaling { margin-bottom: .8rem; }
@media (max-width: 600px) { th, td { padding: .2rem .3rem; }
  td:last-child.text { min-width: 0; overflow-wrap: anywhere; } }
@media print { svg, .legend, .rank { break-inside: avoid; } .legend, .label { break-after: avoid; } }
"""
MAX_BARS = 4
DRAWN_MICROBATCHES = 2  # times the ranks of a pipeline: what follows repeats
BAR_HEIGHT, ROW_HEIGHT = 26, 18  # pixels
# Shades of one colour for one kind of use: computation blue, communication orange and red, then the rest.
STEP_COLOURS = {
    "products": "#0072B2",
    "attention": "#3b94c8",
    "head_and_loss": "#77b8dd",
    "other_compute": "#b3d7ec",
    "tensor_parallel": "#D55E00",
    "context_parallel": "#e07f33",
    "expert_parallel": "#E69F00",
    "data_parallel": "#f0bd57",
    "pipeline": "#f6dca3",
    "bubble": "#999999",
    "copies": "#CC79A7",
    "optimizer": "#009E73",
}
MEMORY_COLOURS = {
    "parameters": "#0072B2",
    "gathered": "#56B4E9",
    "gradients": "#009E73",
    "optimizer_states": "#CC79A7",
    "activations": "#E69F00",
    "working": "#D55E00",
    "runtime": "#999999",
    "reserved": "#cccccc",
}
PASSES: Mapping[Kind, tuple[str, str]] = {
    "forward": ("forward", "#0072B2"),
    "backward": ("backward", "#009E73"),
    "backward_input": ("backward for inputs", "#E69F00"),
    "backward_weight": ("backward for weights", "#CC79A7"),
}
CHUNK_SHADES = 5  # shades of stages of one rank
Bars = Mapping[str, Mapping[str, float]]  # the parts by name of each bar, by the text above it


def build_page(answer: Answer, scaling: Mapping[int, Candidate]) -> str:
    """Return the HTML of a plan; `scaling` has the fastest layout by number of GPUs."""
    cluster = answer.problem.cluster
    title = escape(f"Plan: {answer.model} on {cluster.gpus:,} x {cluster.device.name}")
    items = "".join(
        f"<dt>{escape(name)}</dt>" + "".join(f"<dd>{escape(line)}</dd>" for line in lines)
        for name, lines in list_sections(answer)
    )
    sections = [
        _section("Where the time goes", _draw_steps(answer)),
        _section("Where the memory goes", _draw_memory(answer)),
        _draw_pipeline(answer) if answer.best.layout.pp > 1 else "",
        _show_scaling(scaling, answer.error_share) if len(scaling) > 1 else "",
    ]
    if answer.faster is not None:
        sections.append(_section("The given layout and the fastest", _table(*differences_table(answer))))
    sections.append(_section("The fastest layouts", _table(*layouts_table(answer))))
    style = (files("sweeper.pages") / "page.css").read_text() + STYLE
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{title}</title><style>{style}</style></head><body><h1>{title}</h1>"
        f"<dl class='plan'>{items}</dl>{''.join(sections)}</body></html>"
    )


def _section(title: str, content: str, note: str = "") -> str:
    paragraph = f"<p class='note'>{escape(note)}</p>" if note else ""
    return f"<section><h2>{escape(title)}</h2>{paragraph}{content}</section>"


def _table(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of numbers, with text in the last column."""
    head = "".join(f"<th>{escape(name)}</th>" for name in heading)
    body = ""
    for *numbers, text in rows:
        cells = "".join(f"<td class='number'>{escape(cell)}</td>" for cell in numbers)
        body += f"<tr>{cells}<td class='text'>{escape(text)}</td></tr>"
    return f"<div class='scroll'><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def _draw_steps(answer: Answer) -> str:
    """Return the step of the fastest layout of each of the fastest divisions of the GPUs.

    Where fields were given, the fastest of all stands before them.
    """
    by_division: dict[tuple[object, ...], Candidate] = {}
    for candidate in [*filter(None, [answer.faster]), *answer.result.best]:
        layout = candidate.layout
        by_division.setdefault((layout.dp, layout.tp, layout.cp, layout.pp, layout.ep, layout.checkpointing), candidate)
    bars, error_share = {}, answer.error_share
    for candidate in list(by_division.values())[:MAX_BARS]:
        step = candidate.estimate.step
        factors = (1.0, 1 - error_share, 1 + error_share)
        expected, low, high = (round_to_band(step.total_s * factor, error_share) for factor in factors)
        bars[f"{expected} s ({low} to {high}): {describe(candidate.layout)}"] = vars(step)
    return draw_bars(bars, STEP_COLOURS, "s", error_share=error_share)


def _draw_memory(answer: Answer) -> str:
    problem = answer.problem
    usable_gib = USABLE_MEMORY * problem.cluster.device.memory_gib
    stages = answer.best.estimate.stages
    ranks = {0: "first", len(stages) - 1: "last"} if len(stages) > 1 else {0: "only"}
    bars = {}
    for rank, name in ({stages.index(answer.best.estimate.memory): "fullest"} | ranks).items():
        text = f"{name} pipeline rank ({rank}): {stages[rank].total_gib:.0f} of {usable_gib:.0f} GiB usable"
        bars[text] = vars(stages[rank])
    return draw_bars(
        bars,
        MEMORY_COLOURS,
        "GiB",
        error_share=find_band(problem.job, problem.cluster, "memory").error_share,
        limit=usable_gib,
    )


def draw_bars(bars: Bars, colours: Mapping[str, str], unit: str, *, error_share: float, limit: float = 0.0) -> str:
    """Return stacked bars of one scale, with their legend; a line marks the limit if there is one.

    Args:
        error_share: of the estimates, which says how many digits their titles have.
    """
    largest = max([limit, *(sum(parts.values()) for parts in bars.values())])
    used = {name: colour for name, colour in colours.items() if any(parts.get(name) for parts in bars.values())}
    x = f"{100 * limit / largest:.2f}%"
    mark = f"<line x1='{x}' x2='{x}' y1='0' y2='{BAR_HEIGHT}' stroke='var(--ink)' stroke-width='2'/>" if limit else ""
    drawn = _legend(used)
    for text, parts in bars.items():
        pieces, start = "", 0.0
        for name, colour in used.items():
            value = parts.get(name, 0.0)
            title = f"{name}: {round_to_band(value, error_share)} {unit}"
            pieces += _rect(start, 100 * value / largest, BAR_HEIGHT, colour, title)
            start += 100 * value / largest
        drawn += f"<p class='label'>{escape(text)}</p>{_svg(BAR_HEIGHT, pieces + mark)}"
    return drawn


def _draw_pipeline(answer: Answer) -> str:
    """Return a row for each pipeline rank, with its passes in the colours of their kinds."""
    layout = answer.best.layout
    job = replace(answer.problem.job, layout=layout)
    drawn = min(layout.microbatches, DRAWN_MICROBATCHES * layout.pp)
    operations = build_timeline(layout, rank_seconds(job, answer.problem.cluster), drawn)
    end_s = max(operation.stop_s for operation in operations)
    rows: dict[int, str] = {}
    for item in sorted(operations, key=lambda operation: operation.rank):
        action = item.action
        name, colour = PASSES[action.kind]
        title = f"micro-batch {action.microbatch}, stage {action.chunk} of the rank, {name}"
        start, share = 100 * item.start_s / end_s, 100 * (item.stop_s - item.start_s) / end_s
        opacity = 1 - 0.7 * (action.chunk % CHUNK_SHADES) / CHUNK_SHADES
        shade = f" class='pass' fill-opacity='{opacity:.2g}'"
        rows[item.rank] = rows.get(item.rank, "") + _rect(start, share, ROW_HEIGHT, colour, title, shade)
    lines = (f"<div class='rank'><span>{rank}</span>{_svg(ROW_HEIGHT, row)}</div>" for rank, row in rows.items())
    kinds = {operation.action.kind for operation in operations}
    legend = _legend(dict(PASSES[kind] for kind in PASSES if kind in kinds))
    axis = f"<div class='rank note'><span>rank</span><span>0</span><span class='end'>{end_s:.2g} s</span></div>"
    rest = "" if drawn == layout.microbatches else f" of {layout.microbatches:,}; the others repeat the middle"
    stages = "; shades are the stages of a rank" if layout.stages_per_rank > 1 else ""
    note = f"Schedule {layout.schedule}, {drawn} micro-batches{rest}{stages}. Sends between ranks are not drawn."
    return _section("The pipeline", f"{legend}{''.join(lines)}{axis}", note)


def _legend(colours: Mapping[str, str]) -> str:
    parts = (f"<span><i style='background:{colour}'></i>{escape(name)}</span>" for name, colour in colours.items())
    return f"<div class='legend'>{''.join(parts)}</div>"


def _svg(height: int, content: str) -> str:
    return f"<svg class='bar' height='{height}' role='img'>{content}</svg>"


def _rect(x: float, width: float, height: int, colour: str, title: str, more: str = "") -> str:
    if width <= 0:
        return ""
    box = f"x='{x:.3f}%' y='0' width='{width:.3f}%' height='{height}' fill='{colour}'{more}"
    return f"<rect {box}><title>{escape(title)}</title></rect>"


def _show_scaling(scaling: Mapping[int, Candidate], error_share: float) -> str:
    rows = []
    for gpus, candidate in scaling.items():
        estimate = candidate.estimate
        values = (estimate.step.total_s, estimate.tokens_per_s_per_gpu, tokens_of_a_day(estimate) / 1e9)
        rounded = [round_to_band(value, error_share) for value in values]
        rows.append([f"{gpus:,}", f"{estimate.tokens / 1e6:.3g}", *rounded, describe(candidate.layout)])
    heading = ["GPUs", "M tokens a step", "step s", "tokens/s per GPU", "G tokens a day", "fastest layout"]
    note = "The fastest layout of each number of GPUs that the model fits into, with the band of published runs."
    if len({candidate.estimate.tokens for candidate in scaling.values()}) > 1:
        note += " The batch grows with the GPUs where each needs a sequence: global_batch= sets one for all."
    rates = {gpus: candidate.estimate.tokens_per_s_per_gpu for gpus, candidate in scaling.items()}
    return _section("Scaling", draw_scaling(rates, error_share) + _table(heading, rows), note)


def draw_scaling(rates: Mapping[int, float], error_share: float) -> str:
    """Return tokens/s per GPU as a line over the number of GPUs, on a logarithmic axis, with its band."""
    fewest, most = min(rates), max(rates)
    highest = max(rates.values()) * (1 + error_share)
    power = 10 ** math.floor(math.log10(highest))
    # A quarter of the top is a round number.
    top = next(factor * power for factor in (1, 1.2, 1.6, 2, 2.4, 3.2, 4, 6, 8, 10) if factor * power >= highest)
    span = max(1.0, math.log2(most / fewest))
    xs = {gpus: 4 + 90 * math.log2(gpus / fewest) / span for gpus in rates}

    def y_of(value: float) -> float:
        return 90 - 82 * value / top

    def line_of(factor: float) -> list[str]:
        return [f"{xs[gpus]:.2f},{y_of(rate * factor):.2f}" for gpus, rate in rates.items()]

    axes = dots = ""
    for step in range(5):
        y = f"{y_of(top * step / 4):.2f}%"
        label = f"{top * step / 4:,.0f}{' tokens/s per GPU, by number of GPUs' if step == 4 else ''}"
        axes += f"<line x1='0' x2='100%' y1='{y}' y2='{y}' stroke='var(--grid)'/>"
        axes += f"<text x='0' y='{y}' dy='-3'>{label}</text>"
    for place, (gpus, rate) in enumerate(rates.items()):
        if place % 2 == (len(rates) - 1) % 2:
            axes += f"<text x='{xs[gpus]:.2f}%' y='98%' text-anchor='middle'>{gpus:,}</text>"
        low, high = rate * (1 - error_share), rate * (1 + error_share)
        title = f"{gpus:,} GPUs: {rate:,.0f} tokens/s per GPU ({low:,.0f} to {high:,.0f})"
        dots += (
            f"<circle cx='{xs[gpus]:.2f}%' cy='{y_of(rate):.2f}%' r='4' fill='#0072B2'><title>{title}</title></circle>"
        )
    band = " ".join([*line_of(1 + error_share), *reversed(line_of(1 - error_share))])
    return (
        f"<svg class='scaling' height='300' role='img'>{axes}"
        "<svg viewBox='0 0 100 100' preserveAspectRatio='none' width='100%' height='100%'>"
        f"<polygon points='{band}' fill='#0072B2' fill-opacity='.2'/>"
        f"<polyline points='{' '.join(line_of(1.0))}' fill='none' stroke='#0072B2' stroke-width='2' "
        f"vector-effect='non-scaling-stroke'/></svg>{dots}</svg>"
    )
