"""Processes train a model together as one process does, whatever the distribution and the placement."""

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

GANGS: list[tuple[Distribution, int]] = [("replicas", 2), ("sharded", 2), ("ring", 2), ("ring", 3)]
LAYERS = {
    "device": [place()] * SHAPE.layers,
    "host": [place("host", "host", "host", "input", "host")] * SHAPE.layers,
    "mixed": [place("host", "device", "host", "gate"), place(), place("device", "host"), place("host", "host", "host")],
}


def build_rank_plan(gang: Gang, layers: list[LayerPlan], rounds: int) -> Plan:
    """Return the plan of a rank. A chunk has one of a batch's two sequences, or in a ring a segment of both."""
    if gang.is_ring:
        return build_plan(layers[: -(-len(layers) // gang.ranks)], "device", rounds, rounds)
    return replace(build_plan(layers, "device", rounds), sequences_per_chunk=1)


def train(gang: Gang, layers: str, rounds: int, dying_rank: int | None = None) -> tuple[list[float], Any]:
    """Train two steps, after the first of which the dying rank exits without a message."""
    before, _, _ = train_with_pytorch(SHAPE, rounds)
    with Arena(32 * 2**20, CPU) as arena:
        plan = build_rank_plan(gang, LAYERS[layers], rounds)
        engine = Engine(SHAPE, plan, arena, CPU, KERNELS["cpu"], precision=FP32, optimizer=OPTIMIZER, gang=gang)
        engine.load(before.__getitem__)
        losses = []
        for batch in draw_tokens(rounds):
            losses.append(float(engine.step(batch if gang.is_ring else batch[:, :, gang.rank : gang.rank + 1])))
            if gang.rank == dying_rank:
                os._exit(1)
        return losses, {name: weight.numpy() for name, weight in engine.copy_weights().items()}


def serve(gang: Gang, port: int, calls: Any, answers: Any) -> None:
    torch.set_num_threads(1)
    with process_group(Rank(gang.rank, gang.ranks, rendezvous=f"127.0.0.1:{port}"), CPU):
        while (call := calls.get()) is not None:
            try:
                answers.put((gang.rank, train(gang, *call)))
            except Exception:
                answers.put((gang.rank, traceback.format_exc()))


@pytest.fixture(params=GANGS, ids=str)
def gang(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Yield a function that trains on all ranks and returns the results of those that answer, but of a dying one."""
    distribution, ranks = request.param
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for rounds in (1, 2):
        train_with_pytorch(SHAPE, rounds)  # before the fork, so that no process does it again
    context: Any = multiprocessing.get_context("fork")
    calls, answers = [context.Queue() for _ in range(ranks)], context.Queue()
    members = [(Gang(distribution, ranks, n), port, calls[n], answers) for n in range(ranks)]
    processes = [context.Process(target=serve, args=member, daemon=True) for member in members]
    for process in processes:
        process.start()

    def run(layers: str, rounds: int, dying_rank: int | None = None) -> list[Any]:
        for queue in calls:
            queue.put((layers, rounds, dying_rank))
        answering = ranks - (dying_rank is not None)
        return [result for _, result in sorted((answers.get(timeout=60) for _ in range(answering)), key=lambda a: a[0])]

    yield run
    for process in processes:
        process.kill()


def test_processes_train_like_plain_pytorch_in_one(gang: Any) -> None:
    for layers, rounds in itertools.product(LAYERS, (1, 2)):
        _, losses, after = train_with_pytorch(SHAPE, rounds)
        for result in gang(layers, rounds):
            assert not isinstance(result, str), result
            rank_losses, weights = result
            assert rank_losses == pytest.approx(losses, abs=1e-5), layers
            for name, weight in after.items():
                torch.testing.assert_close(torch.from_numpy(weights[name]), weight, rtol=0, atol=2e-5, msg=name)


def test_a_rank_whose_peer_dies_fails_within_seconds(gang: Any) -> None:
    started = time.monotonic()
    for error in gang("host", 2, 1):
        assert "remote worker" in error and time.monotonic() - started < 20
