"""Render a comparison as text, Markdown and JUnit XML, and build the tables of a history."""

import math
import statistics
from collections.abc import Sequence

from sweeper.commands.history.reference_file import History, Identity, RecordedRun, Series
from sweeper.common.format import count, format_interval, format_number
from sweeper.pages import junit
from sweeper.pages.html_page import Table
from sweeper.pages.trial_tables import markdown_of
from sweeper.results.comparison import ComparedWork
from sweeper.results.ranking import label_works
from sweeper.results.runs import Verdict

COLUMNS = ("work", "device", "earlier", "now", "change", "verdict", "changed")
CASES = {Verdict.FASTER: junit.PASSED, Verdict.NOT_SLOWER: junit.PASSED, Verdict.SLOWER: junit.FAILED}
MIN_COLUMNS = 4  # work, device, level and unit are shown even in a narrow terminal


def label_series(identities: Sequence[Identity]) -> list[str]:
    """Return a label for each series, composed of the work and the metric."""
    labels = label_works([identity.work for identity in identities])
    return [f"{label} {identity.metric}" for label, identity in zip(labels, identities, strict=True)]


def describe_level(identity: Identity, runs: Sequence[RecordedRun]) -> str:
    level = statistics.geometric_mean(run.value for run in runs)
    return f"{format_number(level)} {identity.unit} ({count(len(runs), 'run')})"


def build_markdown(works: Sequence[ComparedWork], note: str) -> str:
    rows = [(w.work, w.device, w.earlier, w.now, w.change, f"**{w.outcome}**: {w.detail}", w.changed) for w in works]
    return f"{markdown_of(COLUMNS, rows)}\n\n{note}\n"


def build_junit(works: Sequence[ComparedWork]) -> str:
    """Return the comparison as JUnit XML. Slower work counts as failed, and work without a verdict as skipped."""
    cases = []
    for work in works:
        case = CASES.get(work.result.verdict, junit.SKIPPED) if work.result else junit.SKIPPED
        message = ", ".join(filter(None, [work.outcome, work.change, work.detail]))
        cases.append((work.device, work.work, case, message))
    return junit.build_junit("sweeper history", cases)


def build_table(history: History) -> Table:
    """Return a table with one row per series: the current level, the number of runs, and the spread of the runs."""
    heading = ["work", "device", "level", "unit", "runs", "spread %", "last run", "date"]
    rows = []
    for series, label in zip(history.series, label_series([s.identity for s in history.series]), strict=True):
        level, last, identity = series.level, series.runs[-1], series.identity
        # The standard deviation of the runs, including each run's own measurement error.
        spread = f"{100 * statistics.stdev(math.log(run.value) for run in level):.2f}" if len(level) > 1 else "—"
        mean, runs = format_number(statistics.geometric_mean(run.value for run in level)), str(len(level))
        rows.append([label, identity.hardware, mean, identity.unit, runs, spread, last.sweep, last.date[:10]])
    return Table("Current levels", heading, rows)


def build_runs_table(series: Series, title: str) -> Table:
    """Return a table of runs, the latest run first, with the versions that changed before each run."""
    heading = ["sweep", "date", series.identity.unit, "95%", "point", "changed", "commit"]
    rows = []
    for run, changed in zip(series.runs, series.changes, strict=True):
        interval = format_interval(*run.interval.bounds[1:])
        point = " ".join(f"{name}={value}" for name, value in run.point.items())
        cells = [run.sweep, run.date[:10], format_number(run.value), interval, point, ", ".join(changed), run.commit]
        rows.append(cells)
    return Table(title, heading, rows[::-1])
