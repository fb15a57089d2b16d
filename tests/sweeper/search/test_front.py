"""The front of several objectives, measured again: shares, verdicts and points that do not differ."""

import csv
import signal
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import pytest

from sweeper.common.trials import Remeasurement, TrialRecord, TrialStatus
from sweeper.metrics.criteria import Criteria
from sweeper.results.stored import StoredSweep
from sweeper.search.front import MAX_POINTS, Front, FrontPoint, certify, measure_front, select_finalists
from tests.conftest import Workspace, wait_for
from tests.support.factories import trial_record

CRITERIA = Criteria.of({"tokens_per_s": "maximize", "peak_device_gib": "minimize"})
Rounds = Mapping[int, Sequence[tuple[float, float]]]  # tokens/s and GiB by trial


def measured(number: int, speed: float, gib: float, remeasurement: Remeasurement | None = None) -> TrialRecord:
    metrics = {"tokens_per_s": speed, "peak_device_gib": gib}
    return trial_record(number, metrics=metrics, remeasurement=remeasurement)


def certified(rounds: Rounds) -> dict[int, FrontPoint]:
    """Return the points that were measured again with these results."""
    finalists = [measured(number, *values[0]) for number, values in rounds.items()]
    again = [
        measured(100 + place, speed, gib, Remeasurement(number, place, tuple(sorted(rounds))))
        for number, values in rounds.items()
        for place, (speed, gib) in enumerate(values)
    ]
    return {point.trial.number: point for point in certify(finalists, [*finalists, *again], CRITERIA)}


LIMITED = Criteria.of({"tokens_per_s": "maximize", "peak_device_gib": "minimize"}, {"peak_device_gib": 9.5})


def measured_front(rounds: Rounds, searched_gib: Sequence[float], once: Sequence[tuple[float, float]] = ()) -> Front:
    """Return the front within a limit of points that the search measured at these GiB, and of others after them."""
    finalists = [measured(n, values[0][0], gib) for (n, values), gib in zip(rounds.items(), searched_gib, strict=True)]
    group = tuple(sorted(rounds))
    again = [
        measured(100 * (number + 1) + place, *value, Remeasurement(number, place, group))
        for number, values in rounds.items()
        for place, value in enumerate(values)
    ]
    others = [measured(number, *value) for number, value in enumerate(once, start=len(rounds))]
    front = measure_front(LIMITED.rank([*finalists, *others]), [*finalists, *others, *again], LIMITED, top=3)
    assert front is not None
    return front


def noisy(speed: float, gib: float, seed: int, noise: float = 0.01, rounds: int = 5) -> list[tuple[float, float]]:
    return [(speed * factor, gib) for factor in 1 + noise * np.random.default_rng(seed).standard_normal(rounds)]


def test_clear_points_are_on_the_front_and_a_dominated_one_is_not() -> None:
    points = certified({0: noisy(100, 10, 0), 1: noisy(50, 5, 1), 2: noisy(40, 6, 2)})
    assert [points[number].verdict for number in (0, 1, 2)] == ["on the front", "on the front", "dominated"]
    assert [points[number].is_on_front for number in (0, 1, 2)] == [True, True, False]
    assert points[0].values["tokens_per_s"].low < 100 < points[0].values["tokens_per_s"].high
    assert points[0].values["peak_device_gib"].value == pytest.approx(10) and points[0].rounds == 5
    assert not any(point.same_as for point in points.values())


def test_equal_points_are_marked_as_not_told_apart_and_not_sure() -> None:
    """Two points of the same speed and memory, in whose rounds either is faster now and then."""
    one, other = [(100, 5), (101, 5), (99, 5), (100, 5)], [(101, 5), (99, 5), (100, 5), (100.5, 5)]
    points = certified({0: one, 1: other, 2: [(10, 1)] * 4})
    assert points[0].same_as == (1,) and points[1].same_as == (0,) and points[2].same_as == ()
    assert points[0].verdict == points[1].verdict == "not sure" and points[2].verdict == "on the front"
    assert max(points[0].share, points[1].share) < 0.95 and points[2].share > 0.999


def test_points_that_differ_in_one_objective_alone_are_told_apart() -> None:
    points = certified({0: noisy(100, 5.0, 0), 1: noisy(100, 5.1, 1)})
    assert not points[0].same_as and not points[1].same_as


def test_fewer_than_three_rounds_certify_nothing() -> None:
    assert certified({0: [(1, 1)], 1: [(2, 2)]}) == {}
    points = certified({0: [(100, 9)] * 2, 1: [(50, 5)] * 2, 2: [(40, 6)] * 2})
    assert {point.verdict for point in points.values()} == {"not sure"}
    assert [points[number].is_on_front for number in (0, 1, 2)] == [True, True, False]


def test_the_points_that_are_measured_again_are_spread_over_the_front() -> None:
    front = [measured(number, 100 - number, 100 - number) for number in range(40)]
    chosen = [record.number for record in select_finalists(front, CRITERIA, 3)]
    assert len(chosen) == MAX_POINTS and (chosen[0], chosen[-1]) == (0, 39)
    assert max(np.diff(chosen)) <= 4
    assert select_finalists(front, CRITERIA, 0) == [] and len(select_finalists(front, CRITERIA, 20)) == 20


def test_of_a_small_front_the_next_best_trials_are_measured_too() -> None:
    ranked = CRITERIA.rank([measured(0, 10, 1), measured(1, 9, 2), measured(2, 8, 3), measured(3, 7, 4)])
    assert [record.number for record in select_finalists(ranked, CRITERIA, 3)] == [0, 1, 2]


def test_a_limit_is_judged_by_the_median_of_the_rounds_and_not_by_the_search() -> None:
    """Trial 0 keeps 9.5 GiB in the search and takes 9.6 in two of three rounds; trial 1 is beyond it in one."""
    rounds = {0: [(100, 9.4), (100, 9.6), (100, 9.6)], 1: [(90, 9.4), (91, 9.4), (92, 9.9)], 2: [(50, 5)] * 3}
    front = measured_front(rounds, [9.4, 9.4, 5])
    points = {point.trial.number: point for point in front.certified}
    assert points[0].verdict == "beyond a limit: peak_device_gib 9.6, not ≤ 9.5" and points[0].share == 0.0
    assert points[1].verdict == points[2].verdict == "on the front"
    assert front.numbers == [1, 2] and front.leader is points[1].trial


def test_what_a_point_beyond_a_limit_dominated_is_on_the_front() -> None:
    """The search measured trial 3 once: trial 0 dominated it there."""
    rounds = {0: [(100, 9.6)] * 3, 1: [(70, 9.1)] * 3, 2: [(60, 9.0)] * 3}
    front = measured_front(rounds, [9.4, 9.1, 9.0], once=[(95.0, 9.45)])
    assert front.numbers == [1, 2, 3] and [trial.number for trial in front.measured_once] == [3]


def test_where_all_points_are_beyond_a_limit_the_front_is_empty() -> None:
    front = measured_front({n: [(100 - n, 9.6)] * 2 for n in range(3)}, [9.4] * 3)
    assert front.numbers == [] and front.leader is None and len(front.certified) == 3


def test_an_objective_that_differs_by_less_than_its_resolution_decides_nothing() -> None:
    """Both take 5 GiB, one of them a page less in every round: the speed alone decides, and nobody knows it."""
    page_gib = 2**-18
    points = certified({0: noisy(100, 5.0, 0), 1: noisy(100, 5.0 - page_gib, 1), 2: [(10, 1)] * 5})
    assert points[0].same_as == (1,) and points[1].same_as == (0,)
    assert points[0].verdict == points[1].verdict == "not sure" and max(points[0].share, points[1].share) < 0.95


def test_a_slower_point_is_dominated_though_it_takes_a_page_less() -> None:
    points = certified({0: noisy(100, 5.0, 0), 1: noisy(90, 5.0 - 2**-18, 1)})
    assert points[1].verdict == "dominated" and not points[1].is_on_front and points[0].share > 0.99


def test_a_point_is_not_dominated_because_any_of_many_equal_ones_may_be_better() -> None:
    points = certified({number: noisy(100, 5.0, number) for number in range(12)})
    assert min(point.share for point in points.values()) < 0.05
    assert {point.verdict for point in points.values()} == {"not sure"}


@pytest.mark.soak
def test_a_sweep_measures_its_front_again_and_marks_it_everywhere(workspace: Workspace) -> None:
    sweep = ["workload=probe", "objective=[score,step_time_ms]", "space.sleep_s=range(0.01,0.2,0.01)", "space.y=-1"]
    result = workspace.run(*sweep, "space.x=3", "finals.top=3", "finals.rounds=2", "budget.trials=4")
    assert result.code == 0, result.err
    assert "front    front of" in result.out and "in 2 rounds; too few for an interval" in result.out
    assert "; front of 1, new 1 " in result.err
    rows = list(csv.DictReader((workspace.sweeps[0] / "trials.csv").open()))
    on_front = {row["trial"] for row in rows if row["front"] == "yes"}
    assert on_front and sum(row["front_share"] != "" for row in rows) == 3
    tagged = [run.data.tags["sweeper.trial"] for run in workspace.runs("trial") if run.data.tags.get("front") == "yes"]
    assert {*tagged} == on_front


SHAPES = ("space.m=range(64,513,64)", "space.n=256", "space.k=range(64,513,64)", "space.dtype=choice(fp32,bf16)")


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_sweep_with_three_objectives_goes_on_after_ctrl_c_and_kill_9(workspace: Workspace) -> None:
    """Real products: speed, error and time. The front at the end is that of all trials, of which none ran twice."""
    objectives = "objective=[tflops,relative_error,step_time_ms]"
    sweep = ["workload=matmul", objectives, *SHAPES, "budget.trials=24", "finals.rounds=2", "hardware=cpu"]
    kept: list[str] = []
    for signum, ended in ((signal.SIGINT, 6), (signal.SIGKILL, 16)):
        process = workspace.start(*sweep)
        wait_for(partial(has_ended, workspace, ended), timeout_s=240)
        process.send_signal(signum)
        out, _ = process.communicate(timeout=120)
        assert signum == signal.SIGKILL or "resume   " in out
        kept = [str(record) for record in StoredSweep(workspace.sweeps[0]).records.values()]
        assert len(kept) >= ended
    result = workspace.run(*sweep, timeout_s=400)
    assert result.code == 0, result.err
    stored = StoredSweep(workspace.sweeps[0])
    assert [str(record) for record in stored.records.values()][: len(kept)] == kept  # nothing finished is lost
    searched = [r for r in stored.records.values() if not r.remeasurement and r.status is TrialStatus.COMPLETE]
    assert len(searched) == 24 == len({str(record.params) for record in searched})
    assert stored.front is not None and len(stored.front.certified) >= 3
    assert f"front of {len(stored.front.numbers)} trial" in result.out
    tagged = {int(run.data.tags["sweeper.trial"]) for run in workspace.runs("trial") if run.data.tags.get("front")}
    columns = {int(run.data.tags["sweeper.trial"]) for run in workspace.runs("trial") if run.data.metrics.get("front")}
    assert tagged == columns == set(stored.front.numbers)


def has_ended(workspace: Workspace, trials: int) -> bool:
    """Return whether so many trials of the only sweep have ended."""
    if not (workspace.path / "sweeps").exists() or not workspace.sweeps:
        return False
    return len(StoredSweep(workspace.sweeps[0]).records) >= trials
