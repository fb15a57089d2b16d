"""What a comparison prints, and the same as Markdown and as JUnit XML for a pipeline."""

from __future__ import annotations

import math
import statistics
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from sweeper.commands.history.new_runs import Compared, Unknown, describe_changes
from sweeper.commands.history.reference_file import History, Identity, RecordedRun, Series
from sweeper.common.format import count, format_interval, format_number
from sweeper.pages.html_page import Table
from sweeper.results.comparison import describe_more_runs
from sweeper.results.ranking import label_works
from sweeper.results.runs import Comparison, Verdict

COLUMNS = ("work", "device", "earlier", "now", "change", "verdict", "changed")
NOT_COMPARED = "not compared"


@dataclass(frozen=True)
class Line:
    """One series of a comparison, as text.

    Attributes:
        verdict: empty for runs that were not compared.
        detail: what the verdict rests on, or why there is none.
    """

    work: str
    device: str
    earlier: str
    now: str
    change: str
    verdict: Verdict | None
    detail: str
    changed: str = ""

    @property
    def outcome(self) -> str:
        return str(self.verdict or NOT_COMPARED)

    def __str__(self) -> str:
        if self.verdict is None:
            return f"{self.work} on {self.device}: {self.outcome}: {self.detail}"
        changed = f"\n  changed: {self.changed}" if self.changed else ""
        return (
            f"{self.work} on {self.device}: {self.outcome}, {self.change}\n"
            f"  {self.now} against {self.earlier}; {self.detail}{changed}"
        )


def build_lines(compared: Sequence[Compared], unknown: Sequence[Unknown]) -> list[Line]:
    """Return a line for each series, those that were compared first."""
    labels = label_series([*(item.identity for item in compared), *(item.identity for item in unknown)])
    lines = [_build_line(item, label) for item, label in zip(compared, labels, strict=False)]
    for item, label in zip(unknown, labels[len(compared) :], strict=True):
        now = describe_level(item.identity, item.new)
        lines.append(Line(label, describe_hardware(item.identity), "", now, "", None, item.reason))
    return lines


def _build_line(item: Compared, label: str) -> Line:
    return Line(
        work=label,
        device=describe_hardware(item.identity),
        earlier=describe_level(item.identity, item.earlier),
        now=describe_level(item.identity, item.new),
        change=describe_change(item.result),
        verdict=item.result.verdict,
        detail="; ".join(filter(None, [describe_spread(item.result), describe_more_runs(item.result)])),
        changed=", ".join(item.changes),
    )


def label_series(identities: Sequence[Identity]) -> list[str]:
    """Return a label for each series: its work and its metric."""
    labels = label_works([identity.work for identity in identities])
    return [f"{label} {identity.metric}" for label, identity in zip(labels, identities, strict=True)]


def describe_hardware(identity: Identity) -> str:
    """Return the device and how many of them."""
    return f"{identity.devices} x {identity.device}" if identity.devices > 1 else identity.device


def describe_level(identity: Identity, runs: Sequence[RecordedRun]) -> str:
    """Return the geometric mean of runs, and of how many."""
    return f"{format_number(compute_level(runs))} {identity.unit} ({count(len(runs), 'run')})"


def compute_level(runs: Sequence[RecordedRun]) -> float:
    """Return the geometric mean of the runs' values."""
    return math.exp(sum(math.log(run.value) for run in runs) / len(runs))


def describe_change(result: Comparison) -> str:
    """Return the change of the speed in percent with its 95% interval, if it has one."""
    change = f"{result.ratio.value - 1:+.1%}"
    if math.isnan(result.ratio.low):
        return f"{change} (no interval)"
    return f"{change} (95% {result.ratio.low - 1:+.1%} to {result.ratio.high - 1:+.1%})"


def describe_spread(result: Comparison) -> str:
    """Return the spread between runs that the verdict rests on."""
    source = "assumed" if result.spread.is_assumed else "measured"
    return f"{result.spread.value:.1%} between runs ({source})"


def build_markdown(lines: Sequence[Line], note: str) -> str:
    """Return a table of the comparison."""
    rows = [COLUMNS, ("---",) * len(COLUMNS)]
    for line in lines:
        verdict = f"**{line.outcome}**: {line.detail}"
        rows.append((line.work, line.device, line.earlier, line.now, line.change, verdict, line.changed))
    table = "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows)
    return f"{table}\n\n{note}\n"


def build_junit(lines: Sequence[Line]) -> str:
    """Return the comparison as JUnit XML: slower is a failure, what cannot be told is skipped."""
    slower = [line for line in lines if line.verdict is Verdict.SLOWER]
    skipped = [line for line in lines if line.verdict in (None, Verdict.CANNOT_BE_TOLD)]
    counts = {"tests": len(lines), "failures": len(slower), "skipped": len(skipped), "errors": 0}
    suites = ElementTree.Element("testsuites")
    attributes = {name: str(number) for name, number in counts.items()}
    suite = ElementTree.SubElement(suites, "testsuite", {"name": "sweeper history", "time": "0", **attributes})
    for line in lines:
        case = ElementTree.SubElement(suite, "testcase", classname=line.device, name=line.work, time="0")
        message = ", ".join(filter(None, [line.outcome, line.change, line.detail]))
        if line.verdict is Verdict.NOT_SLOWER:
            ElementTree.SubElement(case, "system-out").text = str(line)
        elif line.verdict is Verdict.SLOWER:
            ElementTree.SubElement(case, "failure", message=message).text = str(line)
        else:
            ElementTree.SubElement(case, "skipped", message=message)
    ElementTree.indent(suites)
    return ElementTree.tostring(suites, encoding="unicode", xml_declaration=True) + "\n"


MIN_COLUMNS = 4  # work, device, level and unit are shown in any terminal


def build_table(history: History) -> Table:
    """Return a row for each series: its present level, of how many runs, and what they differ by."""
    heading = ["work", "device", "level", "unit", "runs", "spread %", "last run", "date"]
    labels = label_series([series.identity for series in history.series])
    rows = [_build_row(series, label) for series, label in zip(history.series, labels, strict=True)]
    return Table("Present levels", heading, rows)


def _build_row(series: Series, label: str) -> list[str]:
    level, last = series.level, series.runs[-1]
    mean, unit = format_number(compute_level(level)), series.identity.unit
    spread = _measure_spread(level)
    return [label, describe_hardware(series.identity), mean, unit, str(len(level)), spread, last.sweep, last.date[:10]]


def _measure_spread(runs: Sequence[RecordedRun]) -> str:
    """Return the standard deviation of runs in percent, their own errors included; "—" of one run."""
    if len(runs) < 2:
        return "—"
    return f"{100 * statistics.stdev(math.log(run.value) for run in runs):.2f}"


def build_runs_table(series: Series, title: str) -> Table:
    """Return a row for each run of a series, the last one first, with the versions that changed before it."""
    heading = ["sweep", "date", series.identity.unit, "95%", "point", "changed", "commit"]
    changes = [[], *(describe_changes(before, after) for before, after in pairwise(series.runs))]
    rows = [_build_run(run, changed) for run, changed in zip(series.runs, changes, strict=True)]
    return Table(title, heading, rows[::-1])


def _build_run(run: RecordedRun, changed: Sequence[str]) -> list[str]:
    texts = [*changed, *(["a new level"] if run.starts_level else [])]
    interval = format_interval(run.low or math.nan, run.high or math.nan)
    point = " ".join(f"{name}={value}" for name, value in run.point.items())
    return [run.sweep, run.date[:10], format_number(run.value), interval, point, ", ".join(texts), run.commit]
