"""How the ranks of a gang are placed on nodes: whole on one node if it fits there, else equally on several."""

from __future__ import annotations

from collections.abc import Sequence


def find_ranks_per_node(ranks: int, capacities: Sequence[int]) -> int | None:
    """Return how many ranks of a gang share each of its nodes; None if the gang does not fit.

    It is the largest divisor of `ranks` for which enough nodes have room, so every node of a gang has as many.

    Args:
        ranks: of the gang.
        capacities: the ranks that fit on each node.
    """
    divisors = (share for share in range(ranks, 0, -1) if ranks % share == 0)
    return next((share for share in divisors if _count_nodes(share, capacities) >= ranks // share), None)


def _count_nodes(share: int, capacities: Sequence[int]) -> int:
    return sum(capacity >= share for capacity in capacities)


def count_placements(ranks: int, capacities: Sequence[int], share: int | None = None) -> int:
    """Return how many gangs fit at once, all of them placed alike; 0 if none does.

    Args:
        ranks: of a gang.
        capacities: the ranks that fit on each node.
        share: of the ranks on a node; None: as `find_ranks_per_node` says.
    """
    share = share or find_ranks_per_node(ranks, capacities)
    if share is None:
        return 0
    nodes_per_gang = ranks // share
    shares = [capacity // share for capacity in capacities]
    gangs = sum(shares) // nodes_per_gang
    # A gang takes one share of a node: a node gives at most as many shares as there are gangs.
    while sum(min(count, gangs) for count in shares) < gangs * nodes_per_gang:
        gangs -= 1
    return gangs
