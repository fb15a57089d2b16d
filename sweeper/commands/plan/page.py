"""An answer as one HTML file that opens offline and prints: the text of the plan, and its pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files

from sweeper.commands.plan.answer import Answer, tokens_of_a_day
from sweeper.commands.plan.pictures import (
    MEMORY_COLOURS,
    STEP_COLOURS,
    Bar,
    Point,
    draw_bars,
    draw_scaling,
    draw_timeline,
)
from sweeper.commands.plan.rounding import round_to_band
from sweeper.commands.plan.text import differences_table, layouts_table, list_sections
from workloads.estimator.bands import bands, find_band
from workloads.estimator.search import USABLE_MEMORY, Candidate
from workloads.estimator.step import rank_seconds
from workloads.estimator.timeline import build_timeline
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


def build_page(answer: Answer, scaling: Mapping[int, Candidate]) -> str:
    """Return the HTML of a plan; `scaling` has the fastest layout by number of GPUs."""
    cluster, error_share = answer.problem.cluster, find_band(answer.problem.job).error_share
    title = f"Plan: {answer.model} on {cluster.gpus:,} x {cluster.device.name}"
    sections = [
        _section("Where the time goes", _draw_steps(answer)),
        _section("Where the memory goes", _draw_memory(answer)),
        _draw_pipeline(answer),
        _draw_scaling(answer, scaling),
        _compare(answer, error_share),
        _section("The fastest layouts", _table(*layouts_table(answer, error_share))),
    ]
    style = (files("sweeper.pages") / "page.css").read_text() + STYLE
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{escape(title)}</title><style>{style}</style></head><body><h1>{escape(title)}</h1>"
        f"{_write_sections(answer)}{''.join(sections)}</body></html>"
    )


def _write_sections(answer: Answer) -> str:
    items = "".join(
        f"<dt>{escape(name)}</dt>" + "".join(f"<dd>{escape(line)}</dd>" for line in lines)
        for name, lines in list_sections(answer)
    )
    return f"<dl class='plan'>{items}</dl>"


def _section(title: str, content: str, note: str = "") -> str:
    paragraph = f"<p class='note'>{escape(note)}</p>" if note else ""
    return f"<section><h2>{escape(title)}</h2>{paragraph}{content}</section>"


def _draw_steps(answer: Answer) -> str:
    """Return the step of the fastest layout of each of the fastest divisions of the GPUs.

    Where fields were given, the fastest of all stands before them.
    """
    error_share = find_band(answer.problem.job).error_share
    by_division: dict[tuple[object, ...], Candidate] = {}
    for candidate in [*filter(None, [answer.faster]), *answer.result.best]:
        layout = candidate.layout
        by_division.setdefault((layout.dp, layout.tp, layout.cp, layout.pp, layout.ep, layout.checkpointing), candidate)
    bars = []
    for candidate in list(by_division.values())[:MAX_BARS]:
        step = candidate.estimate.step
        low, high = (round_to_band(step.total_s * (1 + sign * error_share), error_share) for sign in (-1, 1))
        text = f"{round_to_band(step.total_s, error_share)} s ({low} to {high}): {describe(candidate.layout)}"
        bars.append(Bar(text, vars(step)))
    return draw_bars(bars, STEP_COLOURS, "s", error_share=error_share)


def _compare(answer: Answer, error_share: float) -> str:
    if answer.faster is None:
        return ""
    table = _table(*differences_table(answer.best, answer.faster, error_share))
    return _section("The given layout and the fastest", table)


def _draw_memory(answer: Answer) -> str:
    usable_gib = USABLE_MEMORY * answer.problem.cluster.device.memory_gib
    stages = answer.best.estimate.stages
    ranks = {0: "first", len(stages) - 1: "last"} if len(stages) > 1 else {0: "only"}
    ranks = {stages.index(answer.best.estimate.memory): "fullest"} | ranks
    bars = [
        Bar(
            f"{name} pipeline rank ({rank}): {stages[rank].total_gib:.0f} of {usable_gib:.0f} GiB usable",
            vars(stages[rank]),
        )
        for rank, name in ranks.items()
    ]
    return draw_bars(bars, MEMORY_COLOURS, "GiB", error_share=bands()["memory"].error_share, limit=usable_gib)


def _draw_pipeline(answer: Answer) -> str:
    layout = answer.best.layout
    if layout.pp == 1:
        return ""
    seconds = rank_seconds(answer.best_job, answer.problem.cluster)
    drawn = min(layout.microbatches, DRAWN_MICROBATCHES * layout.pp)
    operations = build_timeline(layout, seconds, drawn)
    rest = "" if drawn == layout.microbatches else f" of {layout.microbatches:,}; the others repeat the middle"
    stages = "; shades are the stages of a rank" if layout.stages_per_rank > 1 else ""
    note = f"Schedule {layout.schedule}, {drawn} micro-batches{rest}{stages}. Sends between ranks are not drawn."
    return _section("The pipeline", draw_timeline(operations), note)


def _draw_scaling(answer: Answer, scaling: Mapping[int, Candidate]) -> str:
    if len(scaling) < 2:
        return ""
    error_share = find_band(answer.problem.job).error_share
    rates = [(gpus, candidate.estimate.tokens_per_s_per_gpu) for gpus, candidate in scaling.items()]
    points = [Point(gpus, rate, rate * (1 - error_share), rate * (1 + error_share)) for gpus, rate in rates]
    rows = [
        [
            f"{gpus:,}",
            round_to_band(candidate.estimate.step.total_s, error_share),
            round_to_band(candidate.estimate.tokens_per_s_per_gpu, error_share),
            round_to_band(tokens_of_a_day(candidate.estimate) / 1e9, error_share),
            describe(candidate.layout),
        ]
        for gpus, candidate in scaling.items()
    ]
    heading = ["GPUs", "step s", "tokens/s per GPU", "G tokens a day", "fastest layout"]
    note = "The fastest layout of each number of GPUs that the model fits into, with the band of published runs."
    return _section("Scaling", draw_scaling(points, "tokens/s per GPU") + _table(heading, rows), note)


def _table(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in heading)
    *_, last = range(len(heading))
    body = "".join(
        "<tr>"
        + "".join(f"<td class='{'text' if n == last else 'number'}'>{escape(cell)}</td>" for n, cell in enumerate(row))
        + "</tr>"
        for row in rows
    )
    return f"<div class='scroll'><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
