"""The times of trials by the driver's clock.

A node's wall clock may be wrong, and the ranks of a gang over several nodes may disagree. Workers report times of their
monotonic clocks, which only have another zero.
"""

from __future__ import annotations

import time

MAX_DRIFT = 1e-4  # between two machines' monotonic clocks; crystals are within 100 parts per million


class NodeClocks:
    """How far the driver's monotonic clock is ahead of those of the nodes, by the results that arrive.

    A result arrives after it was made, so the least difference is the closest. Times are too late by the least delay of
    a result on its way, milliseconds, and never too early.
    """

    def __init__(self) -> None:
        self._offsets: dict[str, tuple[float, float]] = {}  # by node id, with the time at which it was observed

    def observe(self, node_id: str, ended_s: float, now_s: float | None = None) -> None:
        """Take in that a result of this node has arrived.

        Args:
            ended_s: when it was made, by the node's monotonic clock.
            now_s: the driver's monotonic clock; None: as it is.
        """
        now_s = time.monotonic() if now_s is None else now_s
        offset_s = now_s - ended_s
        if node_id in self._offsets:
            earlier_s, at_s = self._offsets[node_id]
            offset_s = min(offset_s, earlier_s + MAX_DRIFT * (now_s - at_s))
        self._offsets[node_id] = offset_s, now_s

    def to_driver(self, node_id: str, at_s: float) -> float:
        """Return the driver's monotonic time of a node's monotonic time. A result of the node has been observed."""
        return at_s + self._offsets[node_id][0]
