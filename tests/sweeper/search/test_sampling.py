"""What the sampler is given of a sweep: all of a small one, a part of a large one."""

import pytest
from optuna.distributions import FloatDistribution
from optuna.trial import FrozenTrial, TrialState, create_trial

from sweeper.config.schema import Search
from sweeper.metrics.criteria import Criteria
from sweeper.search import sampling
from sweeper.search.sampling import Ending, SamplingStudy, make_sampler
from tests.support.studies import SCORE

DISTRIBUTIONS = {"x": FloatDistribution(0, 10_000)}
COMPLETE = TrialState.COMPLETE


def finished_trial(number: int) -> tuple[int, FrozenTrial, Ending]:
    value = float(number)
    trial = create_trial(params={"x": value}, distributions=DISTRIBUTIONS, value=value)
    return number, trial, Ending(COMPLETE, (value,))


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "MAX_FINISHED", {"tpe": 20, "gp": 20, "random": 0, "grid": 0})
    monkeypatch.setattr(sampling, "MAX_JUDGED", 20)
    monkeypatch.setattr(sampling, "MAX_RUNNING", 5)
    monkeypatch.setattr(sampling, "SPARE", 15)


@pytest.mark.usefixtures("small_limits")
@pytest.mark.parametrize(("direction", "best"), [("maximize", range(190, 200)), ("minimize", range(10))])
def test_a_large_sweep_keeps_the_best_trials_and_a_sample(direction: str, best: range) -> None:
    study = SamplingStudy(Search("tpe"), Criteria.of({"score": direction}), DISTRIBUTIONS)
    study.load([finished_trial(number) for number in range(200)], {})
    values = [trial.value for trial in study.trials]
    assert len(values) == 20 and {float(value) for value in best} <= {*values}
    assert values == sorted(values)  # in the order of their numbers: a sampler weighs recent trials more


@pytest.mark.usefixtures("small_limits")
def test_the_copy_stays_small_with_many_trials_at_once_and_every_ending_is_learned() -> None:
    study = SamplingStudy(Search("tpe"), SCORE, DISTRIBUTIONS)
    for number in range(100):  # all of them run at once
        study.accept(number, study.ask(make_sampler("random", 0, number)))
        assert len(study.trials) <= 40
    for number in range(100):
        study.finish(number, Ending(COMPLETE, (float(number),)))
        assert len(study.trials) <= 40
    assert 99.0 in [trial.value for trial in study.trials]
    assert not [trial for trial in study.trials if trial.state is TrialState.RUNNING]


@pytest.mark.usefixtures("small_limits")
def test_the_pruner_judges_every_running_trial_of_a_large_sweep() -> None:
    study = SamplingStudy(Search("random", "median"), SCORE, DISTRIBUTIONS)
    for number in range(60):
        study.accept(number, study.ask(make_sampler("random", 0, number)))
    for number in range(59):
        for step in range(1, 10):
            study.should_prune(number, step, 10.0)
        study.finish(number, Ending(COMPLETE, (10.0,)))
    assert study.should_prune(59, 9, 1.0)
    assert study.steps(59) == {9: 1.0} and study.steps(0) == {}


@pytest.mark.usefixtures("small_limits")
def test_random_search_is_given_nothing_and_qmc_everything() -> None:
    trials = [finished_trial(number) for number in range(50)]
    for sampler, count in {"random": 0, "grid": 0, "qmc": 50, "cmaes": 50}.items():
        study = SamplingStudy(Search(sampler), SCORE, DISTRIBUTIONS)
        study.load(trials, {})
        assert len(study.trials) == count, sampler


def test_the_gaussian_process_learns_that_a_region_is_infeasible() -> None:
    """It reads complete trials only: an infeasible one is complete there, with the worst value and a constraint."""
    study = SamplingStudy(Search("gp"), SCORE, DISTRIBUTIONS)
    study.load([finished_trial(0)], {})
    for number in range(1, 24):
        trial = study.ask(make_sampler("random", 0, number))
        study.accept(number, trial)
        out_of_memory = trial.params["x"] > 5000
        ending = Ending(COMPLETE, (trial.params["x"],))
        ending = Ending(TrialState.PRUNED, infeasible=True) if out_of_memory else ending
        study.finish(number, ending)
    assert {trial.state for trial in study.trials} == {COMPLETE}
    assert {*(len(trial.constraints) for trial in study.trials)} == {1}
    proposals = [study.ask(make_sampler("gp", 0, number)).params["x"] for number in range(100, 103)]
    assert all(x <= 5500 for x in proposals), proposals  # without it, the best lies beyond all that was complete
