"""Which parameters mattered, by a measure that needs no model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from sweeper.report.best import BestResult, varying
from sweeper.report.panels import names

FEWEST_TRIALS = 20
MOST_BINS = 8
MEASURE = "share of the variance of ranks"


def trials_of(found: Sequence[BestResult]) -> pd.DataFrame:
    """The trials of several platforms at one kind of work, with their `platform`, the speed of `each` device, and the
    `rank` among the platform's own: from 0 for the slowest to 1 for the fastest."""
    parts = []
    for platform, peak in zip(names(found), found, strict=True):
        speed = peak.trials[f"metric.{peak.speed}"]
        parts.append(peak.trials.assign(platform=platform, each=speed / peak.devices, rank=speed.rank(pct=True)))
    return pd.concat(parts)


def importances(trials: pd.DataFrame) -> dict[str, float]:
    """Of each parameter that varies, what its values explain of the ranks by themselves, 0 to 1; the highest first.

    Numbers of many values are put into bins of as many trials each. What is left of the ranks is noise, or takes two
    parameters together. A value that was tried once explains itself: names that hardly repeat are left out.
    """
    if len(trials) < FEWEST_TRIALS:
        return {}
    groups = {name: _groups(trials[f"param.{name}"]) for name in varying(trials)}
    known = {name: _explained(trials["rank"], own) for name, own in groups.items() if 1 < own.nunique() <= len(own) / 4}
    return dict(sorted(known.items(), key=lambda item: -item[1]))


def _groups(values: pd.Series) -> pd.Series:
    numbers = pd.to_numeric(values, errors="coerce")
    if numbers.notna().all() and numbers.nunique() > MOST_BINS:
        return pd.qcut(numbers, MOST_BINS, labels=False, duplicates="drop")
    return values.fillna("none")


def _explained(ranks: pd.Series, groups: pd.Series) -> float:
    """Kelley's epsilon squared on ranks: (H - k + 1) / (n - k) of k groups of n, with Kruskal and Wallis' H."""
    total = float(((ranks - ranks.mean()) ** 2).sum())
    within = float(((ranks - ranks.groupby(groups.to_numpy()).transform("mean")) ** 2).sum())
    free = len(ranks) - groups.nunique()
    return float(np.clip(1 - within / free / (total / (len(ranks) - 1)), 0, 1)) if total else 0.0
