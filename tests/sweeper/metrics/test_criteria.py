"""What ranks trials: one objective or several, within limits."""

import json
from dataclasses import asdict

from hypothesis import given
from hypothesis import strategies as st

from sweeper.cli.arguments import parse_arguments
from sweeper.cli.composition import compose_sweeps
from sweeper.common.trials import TrialRecord, TrialStatus
from sweeper.config.resolution import ResolvedConfig
from sweeper.metrics.criteria import DIRECTIONS, Criteria, Limit, dominates
from tests.support.factories import sweep_description, trial_record

SPEED_AND_MEMORY = Criteria.of({"tokens_per_s": "maximize", "peak_device_gib": "minimize"})


def measured(number: int, speed: float, gib: float, **changes: object) -> TrialRecord:
    return trial_record(number, metrics={"tokens_per_s": speed, "peak_device_gib": gib}, **changes)


def numbers(records: list[TrialRecord]) -> list[int]:
    return [record.number for record in records]


def test_trials_are_ranked_by_layers_and_then_by_the_leading_objective() -> None:
    records = [measured(0, 1, 1), measured(1, 5, 5), measured(2, 4, 5), measured(3, 3, 2), measured(4, 0, 2)]
    assert numbers(SPEED_AND_MEMORY.front(records)) == [1, 3, 0]
    assert numbers(SPEED_AND_MEMORY.rank(records)) == [1, 3, 0, 2, 4]


def test_a_trial_beyond_a_limit_or_without_an_objective_has_no_rank() -> None:
    limited = Criteria.of({"tokens_per_s": "maximize"}, {"peak_device_gib": 4.0, "tokens_per_s": 2.0})
    records = [measured(0, 9, 4.1), measured(1, 3, 4.0), measured(2, 1, 1), measured(3, 8, 1, status=TrialStatus.LOST)]
    assert numbers(limited.rank([*records, trial_record(4, metrics={"tokens_per_s": 9.0})])) == [1]
    assert numbers(SPEED_AND_MEMORY.front([trial_record(4, metrics={"tokens_per_s": 9.0})])) == []


def test_limits_that_no_trial_keeps_are_named_with_the_nearest_trial() -> None:
    limited = Criteria.of({"tokens_per_s": "maximize"}, {"peak_device_gib": 4.0, "tokens_per_s": 2.0})
    far, near, without = measured(0, 1, 9), measured(1, 3, 4.5), trial_record(2, metrics={"tokens_per_s": 9.0})
    both = "no trial keeps limits.peak_device_gib ≤ 4 and limits.tokens_per_s ≥ 2; the nearest, trial 1, has "
    small = measured(4, 0.5, 3)  # keeps the first limit, so it is not that one alone that no trial keeps
    assert limited.describe_unmet([far, near, small, without]) == f"{both}peak_device_gib 4.5 and tokens_per_s 3"
    unmet = "no trial keeps limits.peak_device_gib ≤ 4; the nearest, trial 1, has peak_device_gib 4.5"
    assert limited.describe_unmet([near, without]) == unmet
    assert "nearest, trial 3," in limited.describe_unmet([without, measured(3, 3, 12)])  # which is known
    assert limited.describe_unmet([without]).endswith("trial 2, has peak_device_gib unknown")
    kept = measured(3, 3, 4)
    assert (
        limited.describe_unmet([far, kept])
        == SPEED_AND_MEMORY.describe_unmet([far])
        == limited.describe_unmet([])
        == ""
    )


def test_a_limit_is_an_upper_bound_where_less_is_better_and_else_a_lower_one() -> None:
    memory, speed = Limit("peak_device_gib", 10.0, "minimize"), Limit("tokens_per_s", 10.0, "maximize")
    assert memory.excess({"peak_device_gib": 12.0}) == 0.2 == speed.excess({"tokens_per_s": 8.0})
    assert memory.excess({"peak_device_gib": 10.0}) == 0.0 == speed.excess({"tokens_per_s": 10.0})
    assert (str(memory), str(speed)) == ("peak_device_gib ≤ 10", "tokens_per_s ≥ 10")
    assert set(DIRECTIONS.values()) == {"maximize", "minimize"}


def resolve(*words: str) -> ResolvedConfig:
    (sweep,) = compose_sweeps(parse_arguments(["workload=probe", *words]))
    return sweep.resolve()


def test_your_own_metrics_have_the_direction_that_the_configuration_declares() -> None:
    declared = ["metrics.val_loss=minimize", "metrics.top1=maximize"]
    resolved = resolve("objective=[step_time_ms,val_loss]", "limits.top1=0.7", *declared)
    as_mappings = ["metrics={val_loss:minimize,top1:maximize}", "limits={top1:0.7}"]
    assert resolve("objective=[step_time_ms,val_loss]", *as_mappings).criteria == resolved.criteria
    objectives = {"step_time_ms": "minimize", "val_loss": "minimize"}
    assert resolved.criteria == Criteria.of(objectives, {"top1": [0.7, "maximize"]})
    assert sweep_description([], config=json.loads(json.dumps(asdict(resolved.config)))).criteria == resolved.criteria
    for key in ("objective", "workload.objective"):
        assert resolve(f"{key}=val_loss", *declared).criteria == Criteria.of({"val_loss": "minimize"})


@given(st.lists(st.integers(0, 9), max_size=20), st.sampled_from(["maximize", "minimize"]))
def test_one_objective_ranks_as_ever(values: list[int], direction: str) -> None:
    records = [trial_record(number, metrics={"score": float(value)}) for number, value in enumerate(values)]
    in_order = sorted(records, key=lambda record: record.metrics["score"], reverse=direction == "maximize")
    assert Criteria.of({"score": direction}).rank(records) == in_order


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=20))
def test_the_first_ranked_trials_are_the_front(values: list[tuple[int, int]]) -> None:
    records = [measured(number, speed, gib) for number, (speed, gib) in enumerate(values)]
    front = SPEED_AND_MEMORY.front(records)
    assert SPEED_AND_MEMORY.rank(records)[: len(front)] == front
    losses = [SPEED_AND_MEMORY.ranked_losses(record) or () for record in records]
    assert all(not any(dominates(other, losses[record.number]) for other in losses) for record in front)
