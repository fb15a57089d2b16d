"""The importance of parameters: Kelley's epsilon squared on ranks, a measure that needs no model.

The plots of a sweep and the report show this one measure.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

MIN_TRIALS = 20
MIN_TRIALS_PER_GROUP = 4  # in the mean; a value that was tried once explains itself
MAX_BINS = 8
MEASURE = "share of the variance of ranks"


def compute_importances(ranks: pd.Series, parameters: pd.DataFrame) -> dict[str, float]:
    """Return the share of the ranks' variance that each parameter explains by itself, the highest first.

    Numbers of many values are put into bins of equally many trials. The rest of the variance is noise, or needs two
    parameters together. Parameters of one value and names that hardly repeat are left out.

    Args:
        ranks: the rank of each trial, of any scale.
        parameters: a column for each parameter, in the order of `ranks`.
    """
    if len(ranks) < MIN_TRIALS:
        return {}
    importances = {}
    for name in parameters:
        groups = _group_values(parameters[name])
        if 1 < groups.nunique() <= len(groups) / MIN_TRIALS_PER_GROUP:
            importances[str(name)] = _explained_share(ranks, groups)
    return dict(sorted(importances.items(), key=lambda item: -item[1]))


def _group_values(values: pd.Series) -> pd.Series:
    """Return the group of each trial: its value, or a bin of numbers of many values."""
    numbers = pd.to_numeric(values, errors="coerce")
    bins = min(MAX_BINS, len(values) // MIN_TRIALS_PER_GROUP)
    if numbers.notna().all() and numbers.nunique() > bins:
        return pd.qcut(numbers, bins, labels=False, duplicates="drop")
    return values.fillna("none")


def _explained_share(ranks: pd.Series, groups: pd.Series) -> float:
    """Return Kelley's epsilon squared on ranks.

    It is (H - k + 1) / (n - k) for k groups of n trials, with Kruskal and Wallis' H, limited to 0 to 1.
    """
    total = float(((ranks - ranks.mean()) ** 2).sum())
    within = float(((ranks - ranks.groupby(groups.to_numpy()).transform("mean")) ** 2).sum())
    degrees_of_freedom = len(ranks) - groups.nunique()
    if not total:
        return 0.0
    return float(np.clip(1 - within / degrees_of_freedom / (total / (len(ranks) - 1)), 0, 1))
