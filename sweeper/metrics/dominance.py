"""Dominance between points with several losses, the lower the better in each.

A point dominates another if it is at least as good in every loss and better in one. The front has the points that no
other dominates. Layer 0 is the front, layer 1 the front of what remains without it, and so on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np


def dominates(losses: Sequence[float], others: Sequence[float]) -> bool:
    """Return whether the first point dominates the second."""
    pairs = list(zip(losses, others, strict=True))
    return all(loss <= other for loss, other in pairs) and any(loss < other for loss, other in pairs)


def find_front(losses: Sequence[Sequence[float]]) -> list[int]:
    """Return the positions of the points that no other point dominates, ascending."""
    return [position for position, layer in enumerate(find_layers(losses)) if layer == 0]


def find_layers(losses: Sequence[Sequence[float]]) -> list[int]:
    """Return the layer of each point.

    The points are taken in lexicographic order, so that none is dominated by a later one, and each is put into the
    first layer without a point that dominates it, which bisection finds: a point of a layer is dominated by one of
    each layer before (Zhang, Tian, Cheng and Jin 2015, efficient non-dominated sort with binary search).
    """
    import numpy as np  # takes 0.1 s: every command imports this module, and few have several losses

    points = np.array(losses, dtype=float)
    assigned = [0] * len(points)
    layers: list[list[np.ndarray]] = []
    for position in np.lexsort(points.T[::-1]) if len(points) else ():
        point = points[position]
        low, high = 0, len(layers)
        while low < high:
            middle = (low + high) // 2
            members = np.array(layers[middle])
            is_dominated = ((members <= point).all(axis=1) & (members < point).any(axis=1)).any()
            low, high = (middle + 1, high) if is_dominated else (low, middle)
        if low == len(layers):
            layers.append([])
        layers[low].append(point)
        assigned[position] = low
    return assigned
