"""A search with several objectives or within limits."""

import statistics
from pathlib import Path

import pytest

from sweeper.common.trials import Trial, TrialRecord, TrialStatus
from sweeper.config.schema import Budget
from sweeper.config.space import Interval, Range, Space
from sweeper.metrics.criteria import Criteria
from sweeper.search.progress import SweepProgress
from sweeper.search.study import Study
from tests.support.factories import trial_record
from tests.support.studies import ask_trial, finished, open_study

TWO = Criteria.of({"tokens_per_s": "maximize", "peak_device_gib": "minimize"})
THREE = Criteria.of({"tokens_per_s": "maximize", "peak_device_gib": "minimize", "mfu": "maximize"})
LIMITED = Criteria.of({"tokens_per_s": "maximize"}, {"peak_device_gib": 6.0})
SQUARE = Space({"x": Interval(0, 10), "y": Interval(0, 10)})


def measure(trial: Trial) -> TrialRecord:
    """Return the record of a trial that is faster and larger with x, and slower and larger with y."""
    x, y = (float(trial.params[name] or 0) for name in "xy")
    metrics = {"tokens_per_s": 100 + x - y, "peak_device_gib": 1 + x + y, "mfu": 0.5 - abs(x - 5) / 10}
    return trial_record(trial.number, trial.params, metrics=metrics)


def run(study: Study, trials: int) -> list[TrialRecord]:
    for _ in range(trials):
        study.tell(measure(ask_trial(study)))
    return list(study.records.values())


# The Gaussian process takes a second for each proposal.
SLOW_GP = pytest.param("gp", marks=pytest.mark.soak)


@pytest.mark.parametrize("criteria", [TWO, THREE], ids=["two", "three"])
@pytest.mark.parametrize("sampler", ["tpe", "nsga2", SLOW_GP])
def test_samplers_find_points_near_the_front(tmp_path: Path, sampler: str, criteria: Criteria) -> None:
    """Every point with y = 0 is on the front of speed and memory. The median of random points is 5."""
    records = run(open_study(tmp_path, SQUARE, sampler, criteria=criteria), 14 if sampler == "gp" else 60)
    later = [float(record.params["y"] or 0) for record in records[len(records) * 3 // 4 :]]
    assert statistics.median(later) < 3.5


@pytest.mark.parametrize("sampler", ["tpe", "nsga2", SLOW_GP])
def test_samplers_learn_to_stay_within_a_limit(tmp_path: Path, sampler: str) -> None:
    """The fastest point, x = 10, takes 11 GiB. Of random points 12% are within 6."""
    records = run(open_study(tmp_path, SQUARE, sampler, criteria=LIMITED), 14 if sampler == "gp" else 60)
    later = records[len(records) * 3 // 4 :]
    assert sum(record.metrics["peak_device_gib"] <= 6.0 for record in later) >= 0.2 * len(later)
    assert LIMITED.rank(records)[0].metrics["tokens_per_s"] > 101


@pytest.mark.parametrize("sampler", ["tpe", "nsga2", SLOW_GP])
def test_a_resumed_search_proposes_what_an_uninterrupted_one_does(tmp_path: Path, sampler: str) -> None:
    """NSGA-II too, whose generations are kept in the journal: 45 trials are two of them and a quarter."""
    trials = 11 if sampler == "gp" else 45
    points = []
    for folder, is_interrupted in ((tmp_path / "one", False), (tmp_path / "two", True)):
        folder.mkdir()
        study = open_study(folder, SQUARE, sampler, criteria=TWO)
        run(study, trials)
        running = ask_trial(study)
        if is_interrupted:  # by a kill, while this trial runs
            study = open_study(folder, SQUARE, sampler, criteria=TWO)
            assert ask_trial(study) == running
        study.tell(measure(running))
        points.append([record.params for record in run(study, 3)])
    assert points[0][-3:] == points[1][-3:]


WITHIN = Criteria.of(dict.fromkeys(TWO.metrics, "maximize"), {"mfu": 0.2})


@pytest.mark.parametrize(
    ("sampler", "criteria"),
    [
        *[(sampler, TWO) for sampler in ("tpe", "nsga2", "random")],
        *[(sampler, WITHIN) for sampler in ("tpe", "nsga2", "gp")],
    ],
)
def test_infeasible_and_failed_trials_have_no_objectives(tmp_path: Path, sampler: str, criteria: Criteria) -> None:
    space = Space({"x": Range(0, 40, 1), "y": Range(0, 40, 1)})
    study = open_study(tmp_path, space, sampler, criteria=criteria)
    statuses = [TrialStatus.INFEASIBLE, TrialStatus.COMPLETE, TrialStatus.FAILED, TrialStatus.COMPLETE]
    for number in range(14):
        trial = ask_trial(study)
        status = statuses[number % 4]
        study.tell(measure(trial) if status is TrialStatus.COMPLETE else finished(trial, status))
    reopened = open_study(tmp_path, space, sampler, criteria=criteria)
    ask_trial(reopened)  # the Gaussian process's first one from a model
    assert len(reopened.records) == 14 and not reopened.should_prune(14, 1, 0.0)


def test_progress_keeps_the_front_as_trials_end() -> None:
    progress = SweepProgress(TWO, Budget(trials=100, patience=2), [])
    speeds = [(5, 5), (4, 5), (6, 6), (3, 2), (7, 1)]
    improved = [
        progress.add(trial_record(number, metrics={"tokens_per_s": float(speed), "peak_device_gib": float(gib)}))
        for number, (speed, gib) in enumerate(speeds)
    ]
    assert improved == [True, False, True, True, True]
    assert [record.number for record in progress.front] == [4] and progress.best is progress.front[0]
    assert progress.front == TWO.front(progress.ranked_trials())
    for number in (5, 6):
        assert not progress.add(trial_record(number, metrics={"tokens_per_s": 1.0, "peak_device_gib": 9.0}))
    assert progress.exhausted_limits() == {"patience": 2}


def test_a_trial_beyond_a_limit_is_never_the_best() -> None:
    progress = SweepProgress(LIMITED, Budget(trials=100), [])
    fast = {"tokens_per_s": 9.0, "peak_device_gib": 6.1}
    assert not progress.add(trial_record(0, metrics=fast)) and progress.best is None
    assert progress.add(trial_record(1, metrics={**fast, "peak_device_gib": 6.0}))
