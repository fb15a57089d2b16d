"""What a comparison prints, and the same as Markdown and as JUnit XML for a pipeline; the tables of a history."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from sweeper.commands.history.new_runs import Compared
from sweeper.commands.history.reference_file import History, Identity, RecordedRun, Series
from sweeper.common.format import count, format_interval, format_number
from sweeper.pages import junit
from sweeper.pages.html_page import Table
from sweeper.pages.trial_tables import markdown_of
from sweeper.results.comparison import describe_more_runs
from sweeper.results.ranking import label_works
from sweeper.results.runs import Verdict

COLUMNS = ("work", "device", "earlier", "now", "change", "verdict", "changed")
NOT_COMPARED = "not compared"
MIN_COLUMNS = 4  # work, device, level and unit are shown in any terminal


@dataclass(frozen=True, kw_only=True)
class Line:
    """One series of a comparison, as text.

    Attributes:
        verdict: None for runs that were not compared.
        detail: what the verdict rests on, or why there is none.
    """

    work: str
    device: str
    earlier: str = ""
    now: str
    change: str = ""
    verdict: Verdict | None = None
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


def build_lines(compared: Sequence[Compared]) -> list[Line]:
    """Return a line for each series."""
    lines = []
    for item, label in zip(compared, label_series([item.identity for item in compared]), strict=True):
        now, device = _describe_level(item.identity, item.new), item.identity.hardware
        if item.result is None:
            lines.append(Line(work=label, device=device, now=now, detail=item.reason))
            continue
        spread = item.result.spread
        basis = f"{spread.value:.1%} between runs ({'assumed' if spread.is_assumed else 'measured'})"
        lines.append(
            Line(
                work=label,
                device=device,
                now=now,
                earlier=_describe_level(item.identity, item.earlier),
                change=item.result.ratio.change,
                verdict=item.result.verdict,
                detail="; ".join(filter(None, [basis, describe_more_runs(item.result)])),
                changed=", ".join(item.new[-1].list_changes(item.earlier[-1])),
            )
        )
    return lines


def label_series(identities: Sequence[Identity]) -> list[str]:
    """Return a label for each series: its work and its metric."""
    labels = label_works([identity.work for identity in identities])
    return [f"{label} {identity.metric}" for label, identity in zip(labels, identities, strict=True)]


def compute_level(runs: Sequence[RecordedRun]) -> float:
    """Return the geometric mean of the runs' values."""
    return math.exp(sum(math.log(run.value) for run in runs) / len(runs))


def _describe_level(identity: Identity, runs: Sequence[RecordedRun]) -> str:
    return f"{format_number(compute_level(runs))} {identity.unit} ({count(len(runs), 'run')})"


def build_markdown(lines: Sequence[Line], note: str) -> str:
    """Return a table of the comparison."""
    rows = []
    for line in lines:
        verdict = f"**{line.outcome}**: {line.detail}"
        rows.append((line.work, line.device, line.earlier, line.now, line.change, verdict, line.changed))
    return f"{markdown_of(COLUMNS, rows)}\n\n{note}\n"


def build_junit(lines: Sequence[Line]) -> str:
    """Return the comparison as JUnit XML: slower is a failure, what cannot be told is skipped."""
    outcomes = {str(Verdict.NOT_SLOWER): junit.PASSED, str(Verdict.SLOWER): junit.FAILED}
    cases = []
    for line in lines:
        message = ", ".join(filter(None, [line.outcome, line.change, line.detail]))
        cases.append((line.device, line.work, outcomes.get(line.outcome, junit.SKIPPED), message))
    return junit.build_junit("sweeper history", cases)


def build_table(history: History) -> Table:
    """Return a row for each series: its present level, of how many runs, and what they differ by."""
    heading = ["work", "device", "level", "unit", "runs", "spread %", "last run", "date"]
    rows = []
    for series, label in zip(history.series, label_series([s.identity for s in history.series]), strict=True):
        level, last, identity = series.level, series.runs[-1], series.identity
        # The standard deviation of the runs, their own errors included.
        spread = f"{100 * statistics.stdev(math.log(run.value) for run in level):.2f}" if len(level) > 1 else "—"
        mean, runs = format_number(compute_level(level)), str(len(level))
        rows.append([label, identity.hardware, mean, identity.unit, runs, spread, last.sweep, last.date[:10]])
    return Table("Present levels", heading, rows)


def build_runs_table(series: Series, title: str) -> Table:
    """Return a row for each run of a series, the last one first, with the versions that changed before it."""
    heading = ["sweep", "date", series.identity.unit, "95%", "point", "changed", "commit"]
    rows = []
    for run, changed in zip(series.runs, series.changes, strict=True):
        interval = format_interval(*run.interval.bounds[1:])
        point = " ".join(f"{name}={value}" for name, value in run.point.items())
        rows.append(
            [run.sweep, run.date[:10], format_number(run.value), interval, point, ", ".join(changed), run.commit]
        )
    return Table(title, heading, rows[::-1])
