"""The arena's memory lies on the GPU's NUMA node, where the machine has several and says which."""

import platform
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.support.amd import use_stand_in
from tests.support.amd_device import amd_device
from workloads.instruments import telemetry
from workloads.offload import host_memory
from workloads.offload.host_memory import Arena
from workloads.offload.peer_copies import open_peer_memory

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("gpu_node", "usable", "expected"),
    [
        (1, {0, 1}, 1),
        (0, {0, 1}, 0),
        (0, {0}, None),  # one node: nothing to choose
        (None, {0, 1}, None),  # the driver does not say
        (1, set(), None),  # the kernel does not say
        (3, {0, 1}, None),  # a node that this process may not use
    ],
)
def test_a_node_is_chosen_only_where_it_is_known_and_one_of_several(
    gpu_node: int | None, usable: set[int], expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = SimpleNamespace(identity=SimpleNamespace(numa_node=gpu_node))
    monkeypatch.setattr(host_memory, "find_gpu", lambda device: gpu)
    monkeypatch.setattr(host_memory, "_usable_nodes", lambda: usable)
    assert host_memory.node_of(GPU) == expected


@pytest.mark.parametrize(("visible", "node"), [("3", 0), ("5", 1)])
def test_the_node_is_that_of_the_workers_amd_gpu(visible: str, node: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the stand-in's eight GPUs the first four are on node 0."""
    use_stand_in(monkeypatch)
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", visible)
    for name in ("ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(host_memory, "find_gpu", telemetry.find_gpu.__wrapped__)  # without the cache
    monkeypatch.setattr(host_memory, "_usable_nodes", lambda: {0, 1})
    with amd_device():
        assert host_memory.node_of(GPU) == node
        assert open_peer_memory(GPU, torch.bfloat16, [1]) is None  # its copies are CUDA's: RCCL exchanges instead


def test_without_a_driver_or_a_gpu_nothing_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "_usable_nodes", lambda: {0, 1})
    assert host_memory.node_of(CPU) is None


def test_nodes_are_those_with_memory_that_the_cpuset_allows(tmp_path: Path) -> None:
    assert host_memory._usable_nodes(tmp_path) == set()
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "sys/devices/system/node").mkdir(parents=True)
    (tmp_path / "sys/devices/system/node/has_memory").write_text("0-3,8\n")
    (tmp_path / "proc/self/status").write_text("Name:\tpython\nMems_allowed:\tffff\nMems_allowed_list:\t2-9\n")
    assert host_memory._usable_nodes(tmp_path) == {2, 3, 8}
    assert host_memory.parse_numbers("0") == {0} and host_memory.parse_numbers("\n") == set()


def test_pages_are_bound_and_read_back_by_the_kernel() -> None:
    """The calls are real; a container may refuse them, and then says so."""
    block = torch.empty(1 << 20, dtype=torch.uint8)
    error = host_memory.bind_pages(block, 0)
    block.zero_()
    if platform.machine() in host_memory.MBIND:
        assert error in ("", "Operation not permitted", "Function not implemented")
    if not error:
        assert host_memory.read_nodes(block) <= host_memory._usable_nodes()
        assert host_memory.bind_pages(block, host_memory.MAX_NODES - 2) == "Invalid argument"


@pytest.mark.parametrize(
    ("error", "nodes", "expected"),
    [
        ("", {1}, "1"),
        ("", {0, 1}, "0 1"),  # the node had too little free memory
        ("Operation not permitted", set(), "unknown (not bound: Operation not permitted)"),
    ],
)
def test_an_arena_says_where_its_pages_are(
    error: str, nodes: set[int], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound: list[tuple[int, int]] = []

    def bind(block: torch.Tensor, node: int) -> str:
        bound.append((block.nbytes, node))
        return error

    monkeypatch.setattr(host_memory, "node_of", lambda device: 1)
    monkeypatch.setattr(host_memory, "bind_pages", bind)
    monkeypatch.setattr(host_memory, "read_nodes", lambda block: nodes)
    with Arena(1 << 16, CPU) as arena:
        assert arena.placement == {"gpu_numa_node": 1, "host_numa_nodes": expected}
        assert bound == [(1 << 16, 1)]
        assert not arena.allocate(100, torch.float32).any()


def test_an_arena_on_one_node_is_not_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "bind_pages", lambda block, node: pytest.fail("bound"))
    with Arena(1 << 16, CPU) as arena:
        assert arena.placement == {} and not arena.allocate(100, torch.float32).any()


@pytest.mark.gpu
def test_a_pinned_arena_is_on_the_gpus_node() -> None:
    with Arena(1 << 26, GPU) as arena:
        node, nodes = arena.placement.get("gpu_numa_node"), str(arena.placement.get("host_numa_nodes"))
        assert node is None or nodes == str(node) or "not bound" in nodes
        on_gpu = arena.allocate(1 << 20, torch.uint8).to(GPU, non_blocking=True)
        assert int(on_gpu.sum()) == 0
