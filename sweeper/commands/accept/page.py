"""Render an acceptance record as HTML, Markdown and JUnit XML, with the verdict first and then the failures."""

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from sweeper.commands.accept.experiments import spread_of
from sweeper.commands.accept.judge import finding_verdict, merge_equal
from sweeper.commands.doctor.checks import list_differences
from sweeper.common.format import decimals_apart, one_line, round_to_band
from sweeper.pages import junit
from sweeper.pages.html_page import Chart, Table, build_page, drop_empty
from sweeper.pages.trial_tables import markdown_of

ORDER = ("fail", "inconclusive", "measured", "pass")  # verdicts, the most urgent first
HEADING = ["verdict", "part", "test", "measured", "passes from", "reason", "likely cause (remedy)"]
BESIDE = {"sm_clock_mhz": "MHz", "power_w": "W", "temperature_c": "°C"}  # readings shown next to a rate
TESTS = ["test", "parts", "unit", "median", "slowest", "fastest", "expected", "passes from", "loss found in 99%"]
TESTS += [f"median {unit}" for unit in BESIDE.values()]
# Orange for failed and blue for passed parts: color-blind readers can distinguish the two (Okabe and Ito 2008).
COLORS = [[0.0, "#D55E00"], [0.5, "#F5CBA7"], [0.5, "#D6E6F2"], [1.0, "#0072B2"]]
BAND = {"fillcolor": "#0072B2", "opacity": 0.12}  # the style of the band of expected rates
MOST_POINTS = 64  # with more parts than this, only outliers are shown as points
Record = Mapping[str, Any]


def sort_results(record: Record) -> list[dict[str, Any]]:
    return sorted(record["results"], key=lambda row: ORDER.index(row["verdict"]))


def list_problem_tables(record: Record) -> list[Table]:
    """Return the non-empty tables: failed or inconclusive tests, `doctor` findings, and nodes that differ."""
    urgent = (_build_row(record["kind"], row) for row in sort_results(record) if row["verdict"] in ORDER[:2])
    merged = merge_equal((part, test, (verdict, *rest)) for verdict, part, test, *rest in urgent)
    rows = [[verdict, ", ".join(parts), ", ".join(tests), *rest] for parts, tests, (verdict, *rest) in merged]
    findings = [[finding[name] for name in ("location", "problem", "remedy")] for finding in record["findings"]]
    tables = [
        Table("Failed and open", *drop_empty(HEADING, rows)),
        Table("Problems of nodes and GPUs", ["place", "problem", "remedy"], findings),
        Table("Nodes that differ", ["property", "most nodes", "others"], list(list_differences(record["nodes"]))),
    ]
    return [table for table in tables if table.rows]


def _build_row(kind: str, row: Mapping[str, Any]) -> list[str]:
    pairs = ((row["value"], row["limit"]), (row["limit"], row["value"]))
    rates = [text and f"{text} {row['unit']}" for text in (_round(kind, row["test"], *pair) for pair in pairs)]
    shown = [f"{row['beside'][name]:,.0f} {unit}" for name, unit in BESIDE.items() if name in row["beside"]]
    rates[0] = " at ".join(filter(None, (rates[0], ", ".join(shown))))
    return [row["verdict"], row["part"], row["test"], *rates, one_line(row["reason"]), one_line(row["cause"])]


def _round(kind: str, test: str, rate: float | None, other: float | None = None) -> str:
    """Round a rate to its reproducible digits, or to more if `other` would look equal. Return "" for None."""
    return "" if rate is None else round_to_band(rate, spread_of(kind, test).run, apart_from=other or math.nan)


def summarize_tests(record: Record) -> Iterator[list[str]]:
    """Yield a row of the TESTS table for each test. If there is one part, the slowest and fastest cells are empty."""
    rows = [row for row in sort_results(record) if row["value"]]
    for test in dict.fromkeys(row["test"] for row in rows):
        measured = [row for row in rows if row["test"] == test]
        values, compared = [row["value"] for row in measured], [row for row in measured if row["limit"]]
        slowest, fastest = (min(values), max(values)) if len(values) > 1 else (None, None)
        expected, limit = (max((row[name] for row in compared), default=None) for name in ("expected", "limit"))
        found = f"{max(row['found_loss'] for row in compared):.0%}" if compared else ""
        pairs = ((median(values), None), (slowest, limit), (fastest, None), (expected, None), (limit, slowest))
        rates = [_round(record["kind"], test, *pair) for pair in pairs]
        beside = [[row["beside"][name] for row in measured if name in row["beside"]] for name in BESIDE]
        shown = [f"{median(read):,.0f}" if read else "" for read in beside]
        yield [test, str(len(measured)), measured[0]["unit"], *rates, found, *shown]


def build_html(record: Record) -> str:
    """Return an HTML page for offline use and printing: verdict, problems, charts, tests and the environment."""
    environment = [[*item] for node in [*record["nodes"].values()][:1] for item in node.items()]
    tables = [
        Table("Tests", *drop_empty(TESTS, [*summarize_tests(record)]), "All results are in accept.json."),
        Table("Environment", ["property", "value on the first node"], environment),
    ]
    charts = [*_build_map(record), *_build_distributions(record["results"])]
    made = f"profile {record['profile']}, {record['date']}, sweeper {record['sweeper']}, sha256 {record['sha256'][:16]}"
    return build_page(
        record["sentence"],
        [*list_problem_tables(record), *charts, *(table for table in tables if table.rows)],
        f"Acceptance of {record['devices']} x {record['model']}, {made}.",
    )


def _build_map(record: Record) -> Iterator[Chart]:
    from plotly import graph_objects

    margins: dict[str, dict[int, float]] = defaultdict(dict)
    for row in record["results"]:
        if row["scope"] == "device" and row["value"] and row["limit"]:
            number = int(found[1]) if (found := re.search(r" GPU (\d+)$", row["part"])) else 0
            of_node, margin = margins[row["nodes"][0]], row["value"] / row["limit"] - 1
            of_node[number] = min(margin, of_node.get(number, margin))
    if not margins:
        return
    columns = sorted({number for of_node in margins.values() for number in of_node})
    grid = [[of_node.get(column) for column in columns] for of_node in margins.values()]
    text = [
        ["" if value is None else f"{100 * value:+.{decimals_apart(100 * value, 0.0, 1)}f}%" for value in cells]
        for cells in grid
    ]
    device = record["kind"].upper()
    names = [f"GPU {column}" for column in columns] if device == "GPU" else [device]  # the CPUs of a node are one part
    heat = graph_objects.Heatmap(z=grid, x=names, y=list(margins), text=text, texttemplate="%{text}", showscale=False)
    heat.update(colorscale=COLORS, zmin=-0.1, zmax=0.1, hovertemplate="%{y} %{x}: %{z:+.1%}")
    figure = graph_objects.Figure(heat)
    figure.update_layout(height=75 + 22 * len(margins), margin={"t": 60, "l": 60, "r": 15, "b": 15})
    figure.update_xaxes(side="top")
    figure.update_yaxes(autorange="reversed", type="category")
    yield Chart(f"Nodes and {device}s", [figure], f"Margin of each {device}'s worst test to its limit; below 0 fails.")


def _build_distributions(results: Sequence[Mapping[str, Any]]) -> Iterator[Chart]:
    from plotly import graph_objects

    compared, figures = [row for row in results if row["value"] and row["limit"]], []
    for test in dict.fromkeys(row["test"] for row in compared):
        if len(rows := [row for row in compared if row["test"] == test]) > 1:
            names, values = [row["part"] for row in rows], [row["value"] for row in rows]
            shown: dict[str, Any] = {"boxpoints": "outliers", "marker_color": COLORS[-1][1], "name": ""}
            if len(rows) <= MOST_POINTS:
                shown |= {"boxpoints": "all", "pointpos": 0, "line_width": 0, "fillcolor": "rgba(0,0,0,0)"}
            box = graph_objects.Box(x=values, text=names, **shown)
            limit, expected = (max(row[name] for row in rows) for name in ("limit", "expected"))
            figure = graph_objects.Figure(box).add_vrect(limit, expected**2 / limit, line_width=0, **BAND)
            figure.add_vline(x=limit, line_dash="dash", line_color=COLORS[0][1])
            figure.update_layout(title=f"{test}, {rows[0]['unit']}".rstrip(", "), height=150, showlegend=False)
            figure.update_layout(title_font_size=13, margin={"l": 15, "r": 15, "b": 15})
            figures.append(figure)
    if figures:
        note = "Parts by rate. The dashed line is the strictest limit, the band the expected rates."
        yield Chart("Distributions", figures, note)


def build_markdown(record: Record) -> str:
    """Return Markdown: verdict, failed and inconclusive tests, `doctor` findings, differing nodes, and all tests."""
    devices = f"{record['devices']} x {record['model']}, {record['date']}"
    tables = [markdown_of(table.heading, table.rows) for table in list_problem_tables(record)]
    tables += [markdown_of(*drop_empty(TESTS, rows))] if (rows := [*summarize_tests(record)]) else []
    return "\n\n".join([f"**{record['sentence']}**", devices, *tables, ""])


def build_junit(record: Record) -> str:
    """Return JUnit XML with a case for the overall verdict, each finding that affects results, and each test."""
    cases = [("acceptance", "the whole", record["verdict"], record["sentence"])]
    for found in (finding for finding in record["findings"] if finding["affects_results"]):
        verdict = finding_verdict(found["location"], found.get("by_others", False)).value
        cases.append(("setup", found["location"], verdict, f"{found['problem']}: {found['remedy']}"))
    rows = sort_results(record)
    cases += [(row["test"], row["part"], row["verdict"], f"{row['reason']} {row['cause']}".strip()) for row in rows]
    outcomes = {"pass": junit.PASSED, "fail": junit.FAILED}
    named = [(group, name, outcomes.get(end, junit.SKIPPED), one_line(text)) for group, name, end, text in cases]
    return junit.build_junit("sweeper accept", named)
