"""The history as numbers to draw: a picture of each series, the same for a page and for an image."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sweeper.commands.history.comparison import describe_changes
from sweeper.commands.history.output import compute_level, describe_hardware, label_series
from sweeper.commands.history.reference_file import History, Series
from sweeper.common.format import format_interval, format_number

MOST_TICKS = 6


@dataclass(frozen=True)
class Level:
    """Runs that belong together: their first and last place, from 1, and their mean."""

    first: int
    last: int
    value: float


@dataclass(frozen=True)
class Change:
    """What changed before a run: its place, from 1, and the versions; a new level without any says so."""

    place: int
    text: str


@dataclass(frozen=True)
class Picture:
    """One series.

    Attributes:
        dates: of the runs, in their order.
        errors: the distances from the value to the bounds of its interval, zero without one.
        texts: what each run is, for a pointer over it.
    """

    title: str
    unit: str
    dates: list[str]
    values: list[float]
    errors: list[tuple[float, float]]
    texts: list[str]
    levels: list[Level]
    changes: list[Change]

    @property
    def note(self) -> str:
        """What the numbers in the picture mean."""
        changes = [f"{n}: {change.text}" for n, change in enumerate(self.changes, 1)]
        explained = "Points are runs with their own 95% intervals, dashed lines the levels that later runs are held to."
        return f"{explained} {'Changes. ' if changes else ''}{'; '.join(changes)}".strip()

    @property
    def ticks(self) -> list[int]:
        """The places whose dates are shown: a few, the first and the last among them."""
        count = len(self.dates)
        shown = min(count, MOST_TICKS)
        return sorted({1 + round(n * (count - 1) / max(1, shown - 1)) for n in range(shown)})


def build_pictures(history: History) -> list[Picture]:
    """Return a picture of each series."""
    labels = label_series([series.identity for series in history.series])
    return [_build_picture(series, label) for series, label in zip(history.series, labels, strict=True)]


def _build_picture(series: Series, label: str) -> Picture:
    runs, identity = series.runs, series.identity
    errors = [
        (0.0, 0.0) if run.low is None or run.high is None else (run.value - run.low, run.high - run.value)
        for run in runs
    ]
    bounds = [format_interval(run.low or math.nan, run.high or math.nan) for run in runs]
    values = [
        f"{format_number(run.value)} {identity.unit}" + (f" ({bound})" if bound else "")
        for run, bound in zip(runs, bounds, strict=True)
    ]
    return Picture(
        title=f"{label} on {describe_hardware(identity)}",
        unit=identity.unit,
        dates=[run.date[:10] for run in runs],
        values=[run.value for run in runs],
        errors=errors,
        texts=[f"{run.sweep}, {run.date}<br>{value}" for run, value in zip(runs, values, strict=True)],
        levels=_find_levels(series),
        changes=_find_changes(series),
    )


def _find_levels(series: Series) -> list[Level]:
    starts = [place for place, run in enumerate(series.runs) if run.starts_level or not place]
    ends = [*starts[1:], len(series.runs)]
    return [
        Level(start + 1, end, compute_level(series.runs[start:end])) for start, end in zip(starts, ends, strict=True)
    ]


def _find_changes(series: Series) -> list[Change]:
    changes = []
    for place, (before, after) in enumerate(zip(series.runs, series.runs[1:], strict=False), 2):
        texts = describe_changes(before, after)
        texts += ["a new level"] if after.starts_level else []
        if texts:
            changes.append(Change(place, f"{', '.join(texts)} ({after.date[:10]})"))
    return changes
