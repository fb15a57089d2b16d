"""Python's garbage collection at set steps: a collection at a random time on one rank makes all the others wait."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


class GarbageCollector:
    """Collects Python's garbage every `freq` steps; 0 leaves it to Python.

    As torchtitan's `GarbageCollection` (tools/utils.py), the collections are of the second generation. Beyond it, what
    exists before the first step is frozen: no collection traverses the model and the imported modules.
    """

    def __init__(self, freq: int) -> None:
        self._freq = freq

    def start_step(self, step: int) -> None:
        """Collect if it is this step's turn. Steps count from 0."""
        if self._freq and step and step % self._freq == 0:
            gc.collect(1)

    @property
    def executed_freq(self) -> int:
        """The steps between collections as Python's collector is set now; 0 if it runs by itself."""
        return 0 if gc.isenabled() else self._freq


@contextmanager
def schedule_garbage_collection(freq: int) -> Iterator[GarbageCollector]:
    """Turn off Python's own collections within the context and yield what collects instead; 0 changes nothing."""
    if not freq:
        yield GarbageCollector(0)
        return
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield GarbageCollector(freq)
    finally:
        gc.enable()
        gc.unfreeze()
