"""Which gang takes a trial where trials differ in their environment variables."""

from typing import Any

from sweeper.execution.gang import Environment, Gang
from sweeper.execution.gang_pool import GangsByLoad, choose_retiring, find_unserved

NONE: Environment = ()
TWO: Environment = (("OMP_NUM_THREADS", "2"),)


def make_gang(environment: Environment, trials: int = 0, **state: Any) -> Gang:
    gang = Gang("worker", [], None, [], ["starting"] if state.pop("starting", False) else [], environment, **state)
    gang.trials.extend(range(trials))  # type: ignore[arg-type]  # only their number matters
    return gang


def test_a_trial_gets_the_least_loaded_gang_of_its_environment() -> None:
    by_load = GangsByLoad()
    busy, idle, other = make_gang(TWO, trials=1), make_gang(TWO), make_gang(NONE)
    for gang in (busy, idle, other):
        by_load.push(gang)
    assert [by_load.pop(TWO), by_load.pop(TWO), by_load.pop(TWO)] == [idle, busy, None]
    assert by_load.pop(NONE) is other


def test_a_gang_that_is_full_killed_or_ending_takes_no_trial() -> None:
    by_load = GangsByLoad()
    for gang in (make_gang(TWO, trials=2), make_gang(TWO, killed=True), make_gang(TWO, retiring=True)):
        by_load.push(gang)
    changed = make_gang(TWO)
    by_load.push(changed)
    changed.trials.append(None)  # type: ignore[arg-type]
    assert by_load.pop(TWO) is None


def test_a_starting_gang_serves_as_many_waiting_trials_as_it_holds() -> None:
    assert find_unserved([TWO, TWO, TWO, NONE], [], 2) == [TWO, TWO, NONE]
    starting = make_gang(TWO, starting=True)
    assert find_unserved([TWO, NONE, TWO], [starting], 2) == [NONE]
    assert find_unserved([TWO, NONE, TWO], [starting], 1) == [NONE, TWO]
    assert find_unserved([TWO], [make_gang(TWO, trials=2)], 2) == [TWO]
    assert find_unserved([TWO], [make_gang(TWO, starting=True, draining=True)], 2) == [TWO]


def test_the_gang_with_the_fewest_trials_makes_room_for_another_environment() -> None:
    busy, idle = make_gang(NONE, trials=2), make_gang(NONE, trials=1)
    assert choose_retiring(TWO, [busy, idle]) is idle
    assert choose_retiring(NONE, [busy, idle]) is None
    assert choose_retiring(TWO, [make_gang(NONE, retiring=True), make_gang(NONE, starting=True)]) is None
