"""Successive halving: which trials go on at a rung, also after a resume."""

import math
import random
from pathlib import Path

import optuna
import pytest

from sweeper.config.schema import Search
from sweeper.search.sampling import SuccessiveHalving
from tests.support.studies import ask_trial, finished, open_study

ASHA = Search("random", "asha", min_steps=1, reduction_factor=4)


def run(study: optuna.Study, results: list[float], steps: int) -> list[int]:
    """Return how many steps each of these trials runs, one after the other; a trial has the same value at each."""
    ran = []
    for value in results:
        trial = study.ask()
        for step in range(1, steps + 1):
            trial.report(value, step)
            if trial.should_prune():
                break
        ran.append(step)
        study.tell(trial, value)
    return ran


@pytest.mark.parametrize("direction", ["maximize", "minimize"])
def test_one_trial_in_four_passes_each_rung(direction: str) -> None:
    sign = 1 if direction == "maximize" else -1
    study = optuna.create_study(direction=direction, pruner=SuccessiveHalving(1, 4))
    values = [sign * value for value in random.Random(1).sample(range(400), 400)]
    ran = run(study, [float(value) for value in values], 16)
    assert set(ran) == {1, 4, 16}  # the rungs, and the end
    passed = sum(steps > 1 for steps in ran) / len(ran)
    assert 0.2 < passed < 0.35 and sum(steps > 4 for steps in ran) / len(ran) < 0.12
    assert ran[values.index(399 if sign > 0 else -399)] == 16  # the best one


def test_the_best_so_far_goes_on_and_nobody_waits() -> None:
    study = optuna.create_study(direction="maximize", pruner=SuccessiveHalving(2, 3))
    assert run(study, [1.0, 0.5, 2.0, 2.0, 1.5], 7) == [7, 2, 7, 7, 2]


def test_a_step_without_a_number_ends_a_trial_and_is_no_rival() -> None:
    study = optuna.create_study(direction="maximize", pruner=SuccessiveHalving(1, 4))
    assert run(study, [1.0], 3) == [3]
    trial = study.ask()
    trial.report(math.nan, 1)
    assert trial.should_prune()


def test_rungs_between_reported_steps_are_judged_at_the_next_one() -> None:
    study = optuna.create_study(direction="maximize", pruner=SuccessiveHalving(2, 2))
    first, second = study.ask(), study.ask()
    for trial, value in ((first, 2.0), (second, 1.0)):
        trial.report(value, 1)
        assert not trial.should_prune()
        trial.report(value, 5)
    assert not first.should_prune() and second.should_prune()
    second.report(1.0, 6)  # of the trial that has not heard of it yet
    assert not second.should_prune()


@pytest.mark.parametrize("resumed", [False, True])
def test_rungs_are_those_of_an_uninterrupted_sweep_after_a_resume(tmp_path: Path, resumed: bool) -> None:
    study = open_study(tmp_path, search=ASHA)
    for score in (10.0, 20.0, 30.0):
        trial = ask_trial(study)
        assert [study.should_prune(trial.number, step, score) for step in (1, 2, 3, 4)] == [False] * 4
        study.tell(finished(trial, score=score))
    if resumed:
        study = open_study(tmp_path, search=ASHA)
    slow, fast = ask_trial(study), ask_trial(study)
    assert study.should_prune(slow.number, 1, 29.0)
    assert not study.should_prune(fast.number, 1, 31.0)
