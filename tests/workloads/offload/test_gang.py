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
from unittest.mock import Mock

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
from tests.workloads.offload.test_trials import ON_DEVICE, TINY
from workloads.api.contract import Pruned, Rank
from workloads.api.trial import run_trial
from workloads.instruments.device import device_of
from workloads.instruments.distributed import process_group
from workloads.offload import run
from workloads.offload.device_rates import select_attention_kernel
from workloads.offload.engine import Engine
from workloads.offload.gang import Gang
from workloads.offload.host_memory import Arena
from workloads.offload.peer_copies import CudaDriver, PeerMemory
from workloads.offload.plan import Distribution, LayerPlan, Plan

GANGS: list[tuple[Distribution, int, bool]] = [  # distribution, ranks, whether shares are exchanged by copies
    ("replicas", 2, False),
    ("sharded", 2, False),
    ("sharded", 2, True),
    ("sharded", 3, True),
    ("ring", 2, False),
    ("ring", 3, False),
]
COPIES = {"link_s_per_byte": 1e-9, "peer_copy_s_per_byte": 1e-9}
LAYERS = {
    "device": [place()] * SHAPE.layers,
    "host": [place("host", "host", "host", "input", "host")] * SHAPE.layers,
    "mixed": [place("host", "device", "host", "gate"), place(), place("device", "host"), place("host", "host", "host")],
}


class HostDriver(CudaDriver):
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


def train(gang: Gang, rank: Rank, layers: str, rounds: int, dying_rank: int | None = None) -> tuple[list[float], Any]:
    """Train two steps, after the first of which the dying rank exits without a message."""
    before, _, _ = train_with_pytorch(SHAPE, rounds)
    device = device_of(rank)
    with Arena(32 * 2**20, device) as arena:
        plan = build_rank_plan(gang, LAYERS[layers], rounds)
        kernel = select_attention_kernel(SHAPE, LENGTH, device, torch.float32)
        engine = Engine(SHAPE, plan, arena, device, kernel, precision=FP32, optimizer=OPTIMIZER, gang=gang)
        engine.load(before.__getitem__)
        engine.rehearse(select_tokens(gang, draw_tokens(rounds)[0])[0])
        losses = []
        for batch in draw_tokens(rounds):
            losses.append(float(engine.step(select_tokens(gang, batch))))
            if gang.rank == dying_rank:
                os._exit(1)
        weights = {name: weight.numpy() for name, weight in engine.copy_weights()}
        assert (engine.peer_bytes > 0) == (gang.driver is not None)
        engine.close()
        return losses, weights


def run_out_of_memory(gang: Gang, rank: Rank) -> tuple[object, object]:
    """Run a trial in which the second rank runs out of memory once, and one that is pruned. Return what is recorded."""
    rehearse, failures, driver = run.Engine.rehearse, [gang.rank == 1], HostDriver()

    def fail_once(engine: Engine, groups: torch.Tensor) -> None:
        if failures and failures.pop():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        rehearse(engine, groups)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run.Engine, "rehearse", fail_once)
        patch.setattr(run, "measure_together", lambda one, _: replace(one, rates=replace(one.rates, **COPIES)))
        patch.setattr(run, "CudaDriver", lambda device: driver)
        parameters = {**TINY, **ON_DEVICE, "distribution": gang.distribution}
        measurement = run_trial("offload", parameters, replace(rank, sequence_number=1))
        with pytest.raises(Pruned):
            run_trial("offload", parameters, replace(rank, sequence_number=2, reporter=Mock(report=Mock())))
    assert measurement.machine_info["exchange"] == "copies" and not driver._maps
    return measurement.metrics["replanned_device_gib"], measurement.machine_info["out_of_memory"]


def share_with_one_that_refuses(gang: Gang, rank: Rank, name: str, failure: RuntimeError) -> str:
    """Return the error of a rank where the driver of the second one fails."""
    driver = HostDriver()
    if gang.rank == 1:
        setattr(driver, name, Mock(side_effect=failure))
    with pytest.raises(type(failure)) as error:
        PeerMemory(driver, torch.float32, [8])
    assert not driver._maps
    return str(error.value)


def serve(gang: Gang, copies: bool, rank: Rank, calls: Any, answers: Any) -> None:
    torch.set_num_threads(1)
    device = device_of(rank)
    if copies:
        gang = replace(gang, driver=HostDriver() if device == CPU else CudaDriver(device))
    with process_group(rank, device):
        while (call := calls.get()) is not None:
            function, *arguments = call
            try:
                answers.put((gang.rank, function(gang, rank, *arguments)))
            except Exception:
                answers.put((gang.rank, traceback.format_exc()))


@pytest.fixture
def gang(request: pytest.FixtureRequest, device: str) -> Iterator[Any]:
    """Yield a function that calls another on all ranks and returns the results of those that answer."""
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
    members = []
    for n in range(ranks):
        rank = Rank(n, ranks, device, ranks_per_node=ranks, rendezvous=f"127.0.0.1:{port}")
        members.append((Gang(distribution, ranks, n), copies, rank, calls[n], answers))
    processes = [context.Process(target=serve, args=member, daemon=True) for member in members]
    with pytest.MonkeyPatch.context() as patch:
        for n, process in enumerate(processes):
            patch.setenv("CUDA_VISIBLE_DEVICES", str(n))  # as a worker sees it
            process.start()

    def call(*call: object, answering: int = ranks) -> list[Any]:
        for queue in calls:
            queue.put(call)
        return [result for _, result in sorted(answers.get(timeout=240) for _ in range(answering))]

    yield call
    for process in processes:
        process.kill()


@pytest.mark.parametrize("gang", GANGS, indirect=True, ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_processes_train_like_plain_pytorch_in_one(gang: Any, device: str) -> None:
    for layers, rounds in itertools.product(LAYERS, (1, 2)):
        _, losses, after = train_with_pytorch(SHAPE, rounds)
        for result in gang(train, layers, rounds):
            assert not isinstance(result, str), result
            rank_losses, weights = result
            assert rank_losses == pytest.approx(losses, abs=1e-5), layers
            for name, weight in after.items():
                torch.testing.assert_close(torch.from_numpy(weights[name]), weight, rtol=0, atol=2e-5, msg=name)


@pytest.mark.parametrize("gang", [gang for gang in GANGS if not gang[2]], indirect=True, ids=str)
@pytest.mark.parametrize("device", ["cpu"])
def test_a_rank_whose_peer_dies_fails_within_seconds(gang: Any, device: str, request: pytest.FixtureRequest) -> None:
    started = time.monotonic()
    for error in gang(train, "host", 2, 1, answering=request.node.callspec.params["gang"][1] - 1):
        assert "remote worker" in error and time.monotonic() - started < 20


@pytest.mark.parametrize("gang", [("sharded", 2, False)], indirect=True, ids=str)
@pytest.mark.parametrize("device", ["cpu"])
def test_all_ranks_learn_what_one_lacks_and_follow_too_large_a_plan_by_a_smaller_one(gang: Any, device: str) -> None:
    for name, kind in (("open", RuntimeError), ("allocate", torch.OutOfMemoryError)):
        errors = gang(share_with_one_that_refuses, name, kind(f"{name} failed"))
        assert errors == 2 * [f"memory that GPUs share: {name} failed"]
    assert gang(run_out_of_memory) == 2 * [(0.95, "CUDA out of memory. Tried to allocate 2.00 GiB")]
