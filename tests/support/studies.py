"""Studies of a search over small spaces, and records that end their trials."""

from pathlib import Path
from typing import Any

from sweeper.common.trials import Trial, TrialRecord, TrialStatus
from sweeper.config.schema import Search
from sweeper.config.space import Choice, Range, Space
from sweeper.metrics.criteria import Criteria
from sweeper.search.study import Study
from tests.support.factories import trial_record

SCORE = Criteria.of({"score": "maximize"})
GRID = Space({"a": Range(0, 3, 1), "b": Choice(("x", "y", "z"))})
WIDE = Space({"m": Range(0, 1000, 1), "n": Range(0, 1000, 1)})
SAMPLERS = ["tpe", "gp", "nsga2", "cmaes", "qmc", "random", "grid"]


def open_study(
    folder: Path,
    space: Space = WIDE,
    sampler: str = "random",
    *,
    search: Search | None = None,
    criteria: Criteria = SCORE,
    **arguments: Any,
) -> Study:
    """Open or create the study in `folder`, which by default maximizes the metric `score`."""
    identity = {"space": space.described(), "sampler": sampler}
    return Study(folder / "study.journal", identity, space, search or Search(sampler), 1, criteria, **arguments)


def ask_trial(study: Study) -> Trial:
    """Return the next trial of a study that has one."""
    trial = study.ask()
    assert trial is not None
    return trial


def finished(trial: Trial, status: TrialStatus = TrialStatus.COMPLETE, score: float = 0.0) -> TrialRecord:
    """Return the record that ends this trial."""
    metrics = {"score": score} if status is TrialStatus.COMPLETE else {}
    return trial_record(trial.number, trial.params, status=status, metrics=metrics)
