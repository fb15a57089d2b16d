"""Successive halving: which trials go on at a rung, also after a resume."""

import math
from pathlib import Path

import pytest

from sweeper.common.trials import TrialStatus
from sweeper.config.schema import Search
from tests.support.studies import ask_trial, finished, open_study

ASHA = Search("random", "asha", min_steps=1, reduction_factor=4)


@pytest.mark.parametrize("resumed", [False, True])
def test_rungs_are_those_of_an_uninterrupted_sweep_after_a_resume(tmp_path: Path, resumed: bool) -> None:
    study = open_study(tmp_path, search=ASHA)
    for score in (10.0, 20.0, 30.0):
        trial = ask_trial(study)
        assert [study.should_prune(trial.number, step, score) for step in (1, 2, 3, 4)] == [False] * 4
        study.tell(finished(trial, score=score))
    broken = ask_trial(study)
    assert study.should_prune(broken.number, 1, math.nan)
    study.tell(finished(broken, TrialStatus.PRUNED))
    if resumed:
        study = open_study(tmp_path, search=ASHA)
    slow, fast = ask_trial(study), ask_trial(study)
    assert study.should_prune(slow.number, 1, 29.0)
    assert not study.should_prune(fast.number, 1, 31.0)
