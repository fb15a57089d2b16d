"""Processes train a model together as one process does, whatever the distribution and the placement."""

import ctypes
import itertools
import mmap
import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.workloads.offload.test_engine import (
    CPU,
    DEVICES,
    FP32,
    LENGTH,
    OPTIMIZER,
    SEQUENCES,
    SHAPE,
    build_plan,
    draw_tokens,
    place,
    train_with_pytorch,
)
from workloads.api.contract import Rank
from workloads.instruments.distributed import process_group
from workloads.offload.device_rates import select_attention_kernel
from workloads.offload.engine import Engine
from workloads.offload.gang import Gang
from workloads.offload.host_memory import Arena
from workloads.offload.peer_copies import CudaDriver
from workloads.offload.plan import Distribution, LayerPlan, Plan

GANGS: list[tuple[Distribution, int, bool]] = [  # distribution, ranks, whether shares are exchanged by copies
    ("replicas", 2, False),
    ("sharded", 2, False),
    ("sharded", 2, True),
    ("sharded", 3, True),
    ("ring", 2, False),
    ("ring", 3, False),
]
LAYERS = {
    "device": [place()] * SHAPE.layers,
    "host": [place("host", "host", "host", "input", "host")] * SHAPE.layers,
    "mixed": [place("host", "device", "host", "gate"), place(), place("device", "host"), place("host", "host", "host")],
}


class HostDriver:
    """A stand-in for CUDA's driver between processes of a CPU: memory that they all map."""

    def __init__(self) -> None:
        self._maps: dict[int, mmap.mmap] = {}

    def allocate(self, size_bytes: int) -> int:
        self._file = os.memfd_create("peers")
        os.truncate(self._file, size_bytes)
        return self._map(self._file)

    def _map(self, file: int) -> int:
        mapped = mmap.mmap(file, 0)
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        self._maps[address] = mapped
        return address

    def export(self, address: int) -> bytes:
        return f"/proc/{os.getpid()}/fd/{self._file}".encode()

    def open(self, handle: bytes) -> int:
        return self._map(os.open(handle, os.O_RDWR))

    def close(self, address: int) -> None:
        del self._maps[address]

    free = close

    def view(self, address: int, size_bytes: int) -> torch.Tensor:
        return torch.frombuffer(self._maps[address], dtype=torch.uint8)

    def copy(self, target: int, source: int, size_bytes: int) -> None:
        ctypes.memmove(target, source, size_bytes)

    def write(self, address: int, value: int) -> None:
        ctypes.c_uint32.from_address(address).value = value

    def wait(self, address: int, value: int) -> None:
        deadline_s = time.monotonic() + 60
        while ctypes.c_int32(ctypes.c_uint32.from_address(address).value - value).value < 0:
            assert time.monotonic() < deadline_s, "the other process has not come"
            time.sleep(1e-5)


def build_rank_plan(gang: Gang, layers: list[LayerPlan], rounds: int) -> Plan:
    """Return the plan of a rank: for one sequence of each chunk, or one chunk of three; of a ring, for a segment."""
    if gang.is_ring:
        return build_plan(layers[: -(-len(layers) // gang.ranks)], "device", rounds, rounds)
    part = {"sequences_per_chunk": 1} if gang.ranks == SEQUENCES else {"chunks_per_round": 1}
    return replace(build_plan(layers, "device", rounds), **part)


def select_tokens(gang: Gang, batch: torch.Tensor) -> torch.Tensor:
    if gang.is_ring:
        return batch
    return batch[:, :, gang.rank : gang.rank + 1] if gang.ranks == SEQUENCES else batch[:, gang.rank : gang.rank + 1]


def train(
    gang: Gang, device: torch.device, layers: str, rounds: int, dying_rank: int | None = None
) -> tuple[list[float], Any]:
    """Train two steps, after the first of which the dying rank exits without a message."""
    before, _, _ = train_with_pytorch(SHAPE, rounds)
    with Arena(32 * 2**20, device) as arena:
        plan = build_rank_plan(gang, LAYERS[layers], rounds)
        kernel = select_attention_kernel(SHAPE, LENGTH, device, torch.float32)
        engine = Engine(SHAPE, plan, arena, device, kernel, precision=FP32, optimizer=OPTIMIZER, gang=gang)
        engine.load(before.__getitem__)
        losses = []
        for batch in draw_tokens(rounds):
            losses.append(float(engine.step(select_tokens(gang, batch))))
            if gang.rank == dying_rank:
                os._exit(1)
        weights = {name: weight.numpy() for name, weight in engine.copy_weights().items()}
        assert (engine.peer_bytes > 0) == (gang.driver is not None)
        engine.close()
        return losses, weights


def serve(gang: Gang, copies: bool, device_type: str, port: int, calls: Any, answers: Any) -> None:
    torch.set_num_threads(1)
    device = torch.device(device_type, 0) if device_type == "cuda" else CPU
    if copies:
        gang = replace(gang, driver=HostDriver() if device == CPU else CudaDriver(device))
    with process_group(Rank(gang.rank, gang.ranks, device.type, rendezvous=f"127.0.0.1:{port}"), device):
        while (call := calls.get()) is not None:
            try:
                answers.put((gang.rank, train(gang, device, *call)))
            except Exception:
                answers.put((gang.rank, traceback.format_exc()))


@pytest.fixture
def gang(request: pytest.FixtureRequest, device: str) -> Iterator[Any]:
    """Yield a function that trains on all ranks and returns the results of those that answer, but of a dying one."""
    distribution, ranks, copies = request.param
    if device == "cuda" and torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for rounds in (1, 2):
        train_with_pytorch(SHAPE, rounds)  # before the fork, so that no process does it again
    context: Any = multiprocessing.get_context("fork" if device == "cpu" else "spawn")
    calls, answers = [context.Queue() for _ in range(ranks)], context.Queue()
    members = [(Gang(distribution, ranks, n), copies, device, port, calls[n], answers) for n in range(ranks)]
    processes = [context.Process(target=serve, args=member, daemon=True) for member in members]
    with pytest.MonkeyPatch.context() as patch:
        for n, process in enumerate(processes):
            patch.setenv("CUDA_VISIBLE_DEVICES", str(n))  # as a worker sees it
            process.start()

    def run(layers: str, rounds: int, dying_rank: int | None = None) -> list[Any]:
        for queue in calls:
            queue.put((layers, rounds, dying_rank))
        answering = ranks - (dying_rank is not None)
        return [
            result for _, result in sorted((answers.get(timeout=240) for _ in range(answering)), key=lambda a: a[0])
        ]

    yield run
    for process in processes:
        process.kill()


@pytest.mark.parametrize("gang", GANGS, indirect=True, ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_processes_train_like_plain_pytorch_in_one(gang: Any, device: str) -> None:
    for layers, rounds in itertools.product(LAYERS, (1, 2)):
        _, losses, after = train_with_pytorch(SHAPE, rounds)
        for result in gang(layers, rounds):
            assert not isinstance(result, str), result
            rank_losses, weights = result
            assert rank_losses == pytest.approx(losses, abs=1e-5), layers
            for name, weight in after.items():
                torch.testing.assert_close(torch.from_numpy(weights[name]), weight, rtol=0, atol=2e-5, msg=name)


@pytest.mark.parametrize("gang", [gang for gang in GANGS if not gang[2]], indirect=True, ids=str)
@pytest.mark.parametrize("device", ["cpu"])
def test_a_rank_whose_peer_dies_fails_within_seconds(gang: Any, device: str) -> None:
    started = time.monotonic()
    for error in gang("host", 2, 1):
        assert "remote worker" in error and time.monotonic() - started < 20
