"""Two processes train a model together as one process does, whatever the distribution and the placement."""

import itertools
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
    FP32,
    OPTIMIZER,
    SHAPE,
    build_plan,
    draw_tokens,
    place,
    train_with_pytorch,
)
from workloads.api.contract import Rank
from workloads.instruments.distributed import process_group
from workloads.llama.attention_kernels import KERNELS
from workloads.offload.engine import Engine
from workloads.offload.gang import Gang
from workloads.offload.host_memory import Arena
from workloads.offload.plan import Distribution, LayerPlan, Plan

RANKS = 2
DISTRIBUTIONS: list[Distribution] = ["replicas", "sharded"]
LAYERS = {
    "device": [place()] * SHAPE.layers,
    "host": [place("host", "host", "host", "input", "host")] * SHAPE.layers,
    "mixed": [place("host", "device", "host", "gate"), place(), place("device", "host"), place("host", "host", "host")],
}


def build_rank_plan(layers: list[LayerPlan], rounds: int) -> Plan:
    """Return the plan of a rank, whose chunks have one sequence of the two that the whole batch has."""
    return replace(build_plan(layers, "device", rounds), sequences_per_chunk=1)


def train(
    rank: int, distribution: Distribution, layers: str, rounds: int, dying_rank: int | None = None
) -> tuple[list[float], Any]:
    """Train two steps, after the first of which the dying rank exits without a message."""
    before, _, _ = train_with_pytorch(SHAPE, rounds)
    with Arena(32 * 2**20, CPU) as arena:
        gang, plan = Gang(distribution, RANKS, rank), build_rank_plan(LAYERS[layers], rounds)
        engine = Engine(SHAPE, plan, arena, CPU, KERNELS["cpu"], precision=FP32, optimizer=OPTIMIZER, gang=gang)
        engine.load(before.__getitem__)
        losses = []
        for batch in draw_tokens(rounds):
            losses.append(float(engine.step(batch[:, :, rank : rank + 1])))
            if rank == dying_rank:
                os._exit(1)
        return losses, {name: weight.numpy() for name, weight in engine.copy_weights().items()}


def serve(rank: int, port: int, calls: Any, answers: Any) -> None:
    torch.set_num_threads(1)
    with process_group(Rank(rank, RANKS, rendezvous=f"127.0.0.1:{port}"), CPU):
        while (call := calls.get()) is not None:
            try:
                answers.put((rank, train(rank, *call)))
            except Exception:
                answers.put((rank, traceback.format_exc()))


@pytest.fixture
def gang() -> Iterator[Any]:
    """Yield a function that trains on both ranks and returns the results of those that answer."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for rounds in (1, 2):
        train_with_pytorch(SHAPE, rounds)  # before the fork, so that no process does it again
    context: Any = multiprocessing.get_context("fork")
    calls, answers = [context.Queue() for _ in range(RANKS)], context.Queue()
    processes = [context.Process(target=serve, args=(n, port, calls[n], answers), daemon=True) for n in range(RANKS)]
    for process in processes:
        process.start()

    def run(*call: object, answering: int = RANKS) -> list[Any]:
        for queue in calls:
            queue.put(call)
        return [result for _, result in sorted((answers.get(timeout=60) for _ in range(answering)), key=lambda a: a[0])]

    yield run
    for process in processes:
        process.kill()


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_two_processes_train_like_plain_pytorch_in_one(gang: Any, distribution: Distribution) -> None:
    for layers, rounds in itertools.product(LAYERS, (1, 2)):
        _, losses, after = train_with_pytorch(SHAPE, rounds)
        for result in gang(distribution, layers, rounds):
            assert not isinstance(result, str), result
            rank_losses, weights = result
            assert rank_losses == pytest.approx(losses, abs=1e-5), layers
            for name, weight in after.items():
                torch.testing.assert_close(torch.from_numpy(weights[name]), weight, rtol=0, atol=2e-5, msg=name)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_a_rank_whose_peer_dies_fails_within_seconds(gang: Any, distribution: Distribution) -> None:
    started = time.monotonic()
    (error,) = gang(distribution, "host", 2, 1, answering=1)
    assert "remote worker" in error and time.monotonic() - started < 20
