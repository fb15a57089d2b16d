"""What a smaller budget would have found: the trials that had ended when a sweep had used so many GPU-hours."""

from __future__ import annotations

from dataclasses import replace

import pandas as pd

from sweeper.common.clock import SECONDS_PER_HOUR
from sweeper.results.mlflow_results import Stored


def cut_to_budget(stored: Stored, gpu_hours: float) -> Stored:
    """Return the store with the trials of each sweep within its first so many GPU-hours.

    GPU-hours are those of `budget.gpu_hours`: the GPUs of the search's trials times their hours, in the order in which
    the trials ended. The finals measured the best of all trials, and are left out where any trial is; the front of
    several objectives is then that of the trials that are left.
    """
    trials = stored.trials
    if not len(trials):
        return stored
    used = _used_gpu_hours(trials)
    is_within = used <= gpu_hours
    cut_studies = frozenset(trials.loc[~is_within, "tag.sweeper.study"])
    is_cut = trials["tag.sweeper.study"].isin(cut_studies)
    kept = trials[is_within].copy()
    finals = [column for column in kept.columns if str(column).startswith("final.")]
    kept.loc[is_cut[is_within], finals] = None
    return replace(stored, trials=kept.reset_index(drop=True), cut_studies=cut_studies)


def _used_gpu_hours(trials: pd.DataFrame) -> pd.Series:
    """Return for each trial what its sweep had used when it ended, itself included."""
    seconds = (trials["end"] - trials["start"]).dt.total_seconds().fillna(0.0)
    gpus = trials["param.sweep.gpus"].astype(float) if "param.sweep.gpus" in trials else 1.0
    ordered = (seconds * gpus / SECONDS_PER_HOUR).loc[trials["end"].sort_values(kind="stable").index]
    return ordered.groupby(trials["tag.sweeper.study"]).cumsum().reindex(trials.index)
