"""The time, the failures and the cost of a whole training."""

import numpy as np
import pytest

from sweeper.commands.plan.answer import answer
from sweeper.commands.plan.request import read_request
from tests.support.planner import SMALL
from workloads.api.errors import UserInputError
from workloads.estimator.questions import SECONDS_PER_DAY, Reliability


def test_a_whole_training_costs_what_its_gpu_hours_cost() -> None:
    words = [*SMALL, "pp=1", "tp=1", "train_tokens=1e12", "price_per_hour=2"]
    training = answer(read_request(words)).training
    assert training.cost == pytest.approx(2 * training.gpu_hours)
    assert training.gpu_hours == pytest.approx(24 * training.days * 8)
    without = answer(read_request([*words, "failures_per_gpu_day=0"])).training
    assert without.lost_share == 0
    assert without.days == pytest.approx(training.days * (1 - training.lost_share))


def test_training_that_failures_hold_up_is_refused() -> None:
    words = ["model=llama3_8b", "hardware=h100", "gpus=2048", "failures_per_gpu_day=1", "restart_s=3600"]
    with pytest.raises(UserInputError, match=r"2,048 GPUs fail every 42\.2 s, and restart_s=3600: training would not"):
        answer(read_request(words))


@pytest.mark.parametrize(("failures_s", "checkpoint_s"), [(1e6, 20.0), (1e6, 0.0), (3000.0, 20.0), (100.0, 300.0)])
def test_failures_cost_what_a_simulation_of_them_loses(failures_s: float, checkpoint_s: float) -> None:
    """With the checkpoint interval that loses the least of those tried; each segment is run until it succeeds."""
    restart_s, random = 60.0, np.random.default_rng(0)

    def lose(interval_s: float) -> float:
        passed_s, segments = 0.0, max(20, int(200 * failures_s / interval_s))
        for _ in range(min(segments, 4000)):
            left_s = interval_s + checkpoint_s
            while (failure_s := random.exponential(failures_s)) < left_s:
                passed_s, left_s = passed_s + failure_s, interval_s + checkpoint_s + restart_s
            passed_s += left_s
        return 1 - min(segments, 4000) * interval_s / passed_s

    least = min(lose(failures_s * share) for share in (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0))
    reliability = Reliability(SECONDS_PER_DAY / failures_s, restart_s, checkpoint_s)
    assert reliability.lost_share(1) == pytest.approx(least, abs=0.02)
