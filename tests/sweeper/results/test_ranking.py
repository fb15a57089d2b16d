"""The best results of stored trials: which of them are of the same work."""

import json

import pandas as pd
import pytest

from sweeper.commands.report.charts import group_by_scaling
from sweeper.metrics.criteria import Objective
from sweeper.results.ranking import describe_differences, find_best_results, group_by_work, state_objective
from tests.support.factories import complete_trials


def test_trials_of_different_work_are_not_ranked_together() -> None:
    trials = complete_trials({"H200": [10.0, 20.0, 30.0, 40.0]})
    base = {"workload": "parallel", "model": "llama3_8b", "tp": "searched", "type": "bf16"}
    batches = ("8", "8", "16", "16")
    trials["tag.work"] = [json.dumps({**base, "global_batch": batch}) for batch in batches]
    results = find_best_results(trials)
    assert {(result.work["global_batch"], result.estimate.value) for result in results} == {("8", 20), ("16", 40)}
    assert set(group_by_work(results)) == {
        "parallel llama3_8b bf16 global_batch=8",
        "parallel llama3_8b bf16 global_batch=16",
    }
    assert describe_differences(results[0].work, results[1].work) == ["global_batch 16 against 8"]


def test_scaling_with_the_batch_is_drawn_for_equal_batches_per_device() -> None:
    frames = []
    for devices in (1, 2, 4):
        work = {"workload": "parallel", "model": "llama3_8b", "global_batch": str(8 * devices)}
        frames.append(
            complete_trials({"H200": [100.0 * devices]}, devices=devices).assign(**{"tag.work": json.dumps(work)})
        )
    titles = [title for title, group in group_by_scaling(find_best_results(pd.concat(frames))) if len(group) > 1]
    assert titles == ["Scaling of parallel llama3_8b with a batch of 8 per device"]


def test_the_differences_between_two_kinds_of_work_are_named() -> None:
    work = {"workload": "offload", "model": "llama3_8b", "sequence length": "8192"}
    assert describe_differences(work, {**work, "sequence length": "2048"}) == ["sequence length 8192 against 2048"]
    assert describe_differences(work, {"workload": "offload"}) == [
        "model llama3_8b against unknown",
        "sequence length 8192 against unknown",
    ]
    assert not describe_differences(work, dict(work))


def test_a_single_trial_is_ranked_before_finals_only_if_its_interval_is_above_them() -> None:
    """Trial 0 won the finals of sweep a; trial 0 of sweep b was measured once, with an interval of 10% each side."""
    finals = {"final.metric": "tokens_per_s", "final.trial": "0", "final.rounds": 5.0}
    for single, expected, rounds in ((1050.0, 990.0, 5), (1200.0, 1200.0, 0)):
        trials = complete_trials({"H200": [1100.0, 1000.0, single]}, tp=[1, 2, 4])
        trials["tag.sweeper.study"], trials["tag.sweeper.trial"] = ["a", "a", "b"], ["0", "1", "0"]
        trials = trials.assign(**finals, **{"final.value": 990.0, "final.low": 980.0, "final.high": 1000.0})
        trials.loc[trials["tag.sweeper.study"] == "b", [*finals, "final.value"]] = None
        (best,) = find_best_results(trials)
        assert (best.estimate.value, best.rounds) == (expected, rounds)


def test_with_several_objectives_the_trials_of_the_finals_count_with_their_values_there() -> None:
    """The fastest single trial was slower in the finals; one that was not in them has no rank."""
    trials = complete_trials({"H200": [1300.0, 1200.0, 1250.0]}, tp=[1, 2, 4])
    trials["tag.sweeper.study"], trials["tag.sweeper.trial"] = "a", ["0", "1", "2"]
    values = {"final.trial": ["0", "1", None], "final.value": [1000.0, 1100.0, None], "final.rounds": 3.0}
    trials = trials.assign(**values, **{"final.metric": "tokens_per_s", "final.low": 900.0, "final.high": 1200.0})
    (best,) = find_best_results(trials)
    assert (best.trial["param.tp"], best.estimate.value, best.rounds) == ("2", 1100.0, 3)
    verdicts = ["on the front", "dominated", None]
    (best,) = find_best_results(trials.assign(**{"tag.front_verdict": verdicts}))
    assert (best.trial["param.tp"], best.estimate.value) == ("1", 1000.0)


def of_losses(losses: list[float], **columns: object) -> pd.DataFrame:
    """Trials of two sweeps, a and b alternately, that rank by their loss; the fastest are the last."""
    trials = complete_trials({"H200": [100.0 + n for n in range(len(losses))]}, lr=range(len(losses)))
    names = ["ab"[n % 2] for n in range(len(losses))]
    studies = {"tag.sweeper.study": names, "tag.sweeper.trial": [str(n // 2) for n in range(len(losses))]}
    return trials.assign(**{"metric.loss": losses, "objective": Objective("loss", "minimize")} | studies | columns)


def test_a_sweep_with_another_objective_than_a_rate_is_ranked_by_it() -> None:
    (best,) = find_best_results(of_losses([3.0, 2.5, 2.75, 4.0]))
    assert (best.objective.metric, best.estimate.value, best.trial["param.lr"]) == ("loss", 2.5, "1")
    assert best.unit == "loss" and not best.is_rate
    # of a sweep with several objectives, or of version 0.2, nothing is known, so the fastest trial is the best
    trials = of_losses([3.0, 2.5], objective=Objective("val acc", "maximize")).assign(**{"metric.val acc": [0.5, 0.25]})
    assert find_best_results(trials)[0].objective == Objective("val acc", "maximize")
    (best,) = find_best_results(of_losses([3.0, 2.5], objective=None))
    assert (best.objective.metric, best.trial["param.lr"]) == ("tokens_per_s", "1")


def test_finals_of_a_loss_count_with_their_mean_and_a_single_trial_with_the_worse_bound() -> None:
    """Trial 0 won the finals of sweep a with 2.6; the trial of sweep b has 2.5, at most 2.55 or 2.7."""
    finals = {"final.metric": ["loss", None, "loss"], "final.trial": ["0", None, "0"], "final.rounds": [3.0, None, 3.0]}
    finals |= {"final.value": [2.6, None, 2.6], "final.low": [2.58, None, 2.58], "final.high": [2.62, None, 2.62]}
    for worst, expected in ((2.55, (2.5, 0)), (2.7, (2.6, 3))):
        bounds = {"metric.loss_ci_low": 2.4, "metric.loss_ci_high": worst}
        (best,) = find_best_results(of_losses([2.4, 2.5, 2.3], **finals, **bounds))
        assert (best.estimate.value, best.rounds) == expected
    assert best.estimate.bounds == (2.6, 2.58, 2.62) and best.get_metric("tokens_per_s") == 100.0


def test_sweeps_of_equal_work_and_different_objectives_have_results_of_their_own() -> None:
    results = find_best_results(of_losses([3.0, 2.5], objective=[Objective("loss", "minimize"), None]))
    assert sorted(group_by_work(results)) == ["parallel bf16", "parallel bf16 (loss, lower is better)"]


@pytest.mark.parametrize(
    ("objectives", "stated"),
    [
        ({"tokens_per_s": "maximize"}, None),
        ({"tflops_per_gpu": "maximize"}, None),
        ({"mfu": "maximize"}, None),
        ({"loss": "minimize", "mfu": "maximize"}, None),
        ({"loss": "minimize"}, Objective("loss", "minimize")),
        ({"step_time_ms": "minimize"}, Objective("step_time_ms", "minimize")),
        ({"tflops_slowest_gpu": "maximize"}, Objective("tflops_slowest_gpu", "maximize")),
        ({"reward": "maximize"}, Objective("reward", "maximize")),
        ({"val acc": "maximize"}, Objective("val acc", "maximize")),
    ],
)
def test_rates_are_ranked_by_speed(objectives: dict[str, str], stated: Objective | None) -> None:
    assert state_objective(objectives) == stated
