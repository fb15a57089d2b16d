"""Gangs on nodes: whole where they fit, else in equal parts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sweeper.config.hardware import Node, Target, count_placements, find_ranks_per_node
from sweeper.config.schema import Hardware


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


def nodes_of(*domains: str | None) -> Target:
    """Return nodes of four GPUs in these NVLink domains."""
    nodes = tuple(Node(f"n{n}", 72, "a CPU", 4, "GB200", gpu_domain=domain) for n, domain in enumerate(domains))
    return Target(Hardware(name="gb200"), "NVIDIA GB200", nodes)


@pytest.mark.parametrize(
    ("domains", "ranks", "gangs"),
    [
        (["a", "a", "b", "b"], 8, 2),
        (["a", "a", "a", "b", "b", "b"], 8, 2),  # three, if one of them spanned two domains
        (["a", "a", "b", None], 8, 1),
        (["a", "b", "b"], 4, 3),  # a gang that fits a node may be in any domain
    ],
)
def test_so_many_gangs_fit_whole_into_nvlink_domains(domains: list[str | None], ranks: int, gangs: int) -> None:
    target = nodes_of(*domains)
    assert target.count_gangs(ranks, None) == gangs and target.fits_gpu_domain(ranks) == (ranks > 4)
    assert target.count_gangs(ranks, None, whole_nodes=True) == gangs


def test_a_gang_that_is_larger_than_every_domain_spans_several() -> None:
    target = nodes_of("a", "a", "b")
    assert not target.fits_gpu_domain(12) and target.count_gangs(12, None) == 1
