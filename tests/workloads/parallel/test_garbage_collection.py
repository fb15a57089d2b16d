"""Garbage collection at set steps: Python's own is off meanwhile, and on again afterwards."""

import gc
import weakref

import pytest

from workloads.parallel.run import collect_garbage


class Cycle:
    """An object that only a collection frees."""

    def __init__(self) -> None:
        self.itself = self


def test_garbage_is_collected_at_the_set_steps_alone() -> None:
    before = Cycle()
    with collect_garbage(2) as start_step:
        assert not gc.isenabled() and gc.get_freeze_count() > 0
        cycle, frozen = weakref.ref(Cycle()), weakref.ref(before)
        del before
        alive = []
        for step in range(3):
            start_step(step)
            alive.append(cycle() is not None)
        assert alive == [True, True, False]
        gc.collect()
        assert frozen() is not None
    assert gc.isenabled() and gc.get_freeze_count() == 0
    gc.collect()
    assert frozen() is None


def test_zero_leaves_it_to_python() -> None:
    with collect_garbage(0) as start_step:
        start_step(1)
        assert gc.isenabled()


def test_pythons_collection_is_on_again_after_an_error() -> None:
    with pytest.raises(ValueError), collect_garbage(2):
        raise ValueError
    assert gc.isenabled()
