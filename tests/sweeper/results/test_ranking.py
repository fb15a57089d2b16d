"""The best results of stored trials: which of them are of the same work."""

import json

import pandas as pd

from sweeper.commands.report.charts import group_by_scaling
from sweeper.results.ranking import describe_differences, find_best_results, group_by_work
from tests.support.factories import complete_trials


def test_trials_of_different_work_are_not_ranked_together() -> None:
    trials = complete_trials({"H200": [10.0, 20.0, 30.0, 40.0]})
    base = {"workload": "parallel", "model": "llama3_8b", "tp": "searched", "type": "bf16"}
    batches = ("8", "8", "16", "16")
    trials["tag.work"] = [json.dumps({**base, "global_batch": batch}) for batch in batches]
    results = find_best_results(trials)
    assert {(result.work["global_batch"], result.speed.value) for result in results} == {("8", 20), ("16", 40)}
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
    finals = {"final.speed": "tokens_per_s", "final.trial": "0", "final.rounds": 5.0}
    for single, expected, rounds in ((1050.0, 990.0, 5), (1200.0, 1200.0, 0)):
        trials = complete_trials({"H200": [1100.0, 1000.0, single]}, tp=[1, 2, 4])
        trials["tag.sweeper.study"], trials["tag.sweeper.trial"] = ["a", "a", "b"], ["0", "1", "0"]
        trials = trials.assign(**finals, **{"final.value": 990.0, "final.low": 980.0, "final.high": 1000.0})
        trials.loc[trials["tag.sweeper.study"] == "b", [*finals, "final.value"]] = None
        (best,) = find_best_results(trials)
        assert (best.speed.value, best.rounds) == (expected, rounds)


def test_with_several_objectives_the_trials_of_the_finals_count_with_their_values_there() -> None:
    """The fastest single trial was slower in the finals; one that was not in them has no rank."""
    trials = complete_trials({"H200": [1300.0, 1200.0, 1250.0]}, tp=[1, 2, 4])
    trials["tag.sweeper.study"], trials["tag.sweeper.trial"] = "a", ["0", "1", "2"]
    values = {"final.trial": ["0", "1", None], "final.value": [1000.0, 1100.0, None], "final.rounds": 3.0}
    trials = trials.assign(**values, **{"final.speed": "tokens_per_s", "final.low": 900.0, "final.high": 1200.0})
    (best,) = find_best_results(trials)
    assert (best.trial["param.tp"], best.speed.value, best.rounds) == ("2", 1100.0, 3)
