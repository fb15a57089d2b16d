"""Gangs on nodes: whole where they fit, else in equal parts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sweeper.config.placement import count_placements, find_ranks_per_node


@pytest.mark.parametrize(
    ("ranks", "capacities", "share", "gangs"),
    [
        (8, [8, 8], 8, 2),
        (4, [8, 8], 4, 4),
        (3, [8, 8], 3, 4),  # two on each node, where sixteen GPUs would give five
        (16, [8, 8, 8], 8, 1),
        (12, [8, 8], 6, 1),
        (12, [8, 8, 8, 8], 6, 2),
        (9, [8, 8, 8], 3, 2),
        (8, [8, 4, 4], 8, 1),
        (4, [2, 2, 2], 2, 1),
        (16, [8], None, 0),
        (7, [4, 4], None, 0),
    ],
)
def test_a_gang_is_whole_or_in_equal_parts(ranks: int, capacities: list[int], share: int | None, gangs: int) -> None:
    assert find_ranks_per_node(ranks, capacities) == share
    assert count_placements(ranks, capacities) == gangs


@given(st.integers(1, 24), st.lists(st.integers(0, 9), min_size=1, max_size=6))
def test_so_many_gangs_can_be_placed(ranks: int, capacities: list[int]) -> None:
    """Placing one gang after another on the nodes with the most room succeeds as often as promised, and not once more
    than there are GPUs for."""
    share, gangs = find_ranks_per_node(ranks, capacities), count_placements(ranks, capacities)
    assert gangs * ranks <= sum(capacities) and (gangs > 0) == (share is not None)
    free = list(capacities)
    for _ in range(gangs):
        assert share is not None
        nodes = sorted(range(len(free)), key=lambda node: -(free[node] // share))[: ranks // share]
        assert len(nodes) == ranks // share and all(free[node] >= share for node in nodes)
        for node in nodes:
            free[node] -= share
