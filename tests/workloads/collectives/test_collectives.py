"""Collectives over gloo between forked processes, and over NCCL between GPUs: results, sizes and the bus bandwidth."""

import multiprocessing
import socket
import statistics
import traceback
from typing import Any, get_args

import pytest
import torch

from tests.conftest import Workspace
from workloads.api import registry
from workloads.api.contract import Infeasible, Measurement, Rank
from workloads.api.trial import run_trial
from workloads.collectives import Collective
from workloads.collectives.run import BUS_FACTORS, Group, Operation, build_operation, time_calls
from workloads.instruments.host_waits import ThreadWaits

NAMES: tuple[Collective, ...] = get_args(Collective)
FIXED: dict[str, Any] = {"kib": 6, "dtype": "fp32", "warmup": 1, "repeats": 2}
TRIALS: list[tuple[str, dict[str, Any]]] = [
    *(("collectives", FIXED | {"collective": name, "ranks": 0}) for name in NAMES),
    ("collectives", FIXED | {"collective": "send_receive", "ranks": 2}),
]


def run_trials(number: int, rendezvous: str, results: Any) -> None:
    """Run all trials as one of four ranks, and put their measurements or a traceback into `results`."""
    torch.set_num_threads(1)
    try:
        ranks = [
            Rank(number, 4, ranks_per_node=4, rendezvous=rendezvous, sequence_number=n + 1) for n in range(len(TRIALS))
        ]
        results.put([run_trial(name, trial, rank) for (name, trial), rank in zip(TRIALS, ranks, strict=True)])
    except Exception:
        results.put(traceback.format_exc())


@pytest.fixture(scope="module")
def measurements() -> list[list[Measurement]]:
    """The measurements of each of four ranks: a trial raises unless the results of its collective are right."""
    registry.load("collectives")  # imports every workload once, and not in each process
    fork: Any = multiprocessing.get_context("fork")  # importing torch in a new process takes seconds
    results = fork.Queue()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        rendezvous = f"127.0.0.1:{free.getsockname()[1]}"
    processes = [fork.Process(target=run_trials, args=(n, rendezvous, results), daemon=True) for n in range(4)]
    for process in processes:
        process.start()
    try:
        by_rank = [results.get(timeout=100) for _ in processes]
    finally:
        for process in processes:
            process.kill()
    assert not any(isinstance(answer, str) for answer in by_rank), by_rank
    return by_rank


def test_collectives_report_what_they_executed(measurements: list[list[Measurement]]) -> None:
    for of_rank in measurements:
        for (_, parameters), measurement in zip(TRIALS, of_rank, strict=True):
            assert parameters.items() <= measurement.executed.items()
            assert len(measurement.step_times_s) == parameters["repeats"]


def test_the_bus_bandwidth_is_that_of_nccl_tests(measurements: list[list[Measurement]]) -> None:
    # doc/PERFORMANCE.md of nccl-tests, over four ranks.
    factors = {"all_reduce": 1.5, "all_gather": 0.75, "reduce_scatter": 0.75, "all_to_all": 0.75, "send_receive": 1}
    for (_, parameters), measurement in zip(TRIALS, measurements[0], strict=True):
        if parameters.get("ranks") == 0:
            rate = 6 * 1024 / statistics.median(measurement.step_times_s) / 1e9
            assert measurement.metrics["bus_gb_s"] == pytest.approx(factors[str(parameters["collective"])] * rate)


def test_a_wrong_result_is_an_error() -> None:
    buffer = torch.zeros(4)
    operation = Operation(buffer, buffer, lambda: buffer.add_(1), (2.0,))
    operation.check(0)
    with pytest.raises(ArithmeticError, match="the result is not 3"):
        Operation(buffer, buffer, lambda: buffer.add_(1), (3.0,)).check(0)


def test_a_disturbed_rank_calls_as_often_as_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    waited_s = iter(range(10**6))
    monkeypatch.setattr(ThreadWaits, "waited_s", lambda *_: next(waited_s))
    calls: list[None] = []
    times_s = time_calls(lambda: calls.append(None), torch.device("cpu"), warmup=2, repeats=3)
    assert (len(calls), len(times_s)) == (5, 3)


@pytest.mark.parametrize("name", NAMES)
def test_the_size_is_that_of_the_larger_buffer(name: Collective) -> None:
    operation = build_operation(name, 12, torch.float32, torch.device("cpu"), Group(None, 0, 3, 0))
    assert operation.size_bytes == 12 * 1024
    assert BUS_FACTORS[name](2) == (0.5 if name in ("all_gather", "reduce_scatter", "all_to_all") else 1)


@pytest.mark.parametrize(("world", "ranks", "reason"), [(1, 0, "at least two ranks"), (4, 3, "do not divide the gang")])
def test_groups_that_cannot_be_formed_are_infeasible(world: int, ranks: int, reason: str) -> None:
    with pytest.raises(Infeasible, match=reason):
        run_trial("collectives", {"ranks": ranks}, Rank(0, world, ranks_per_node=world))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("name", NAMES)
def test_collectives_run_between_two_gpus(name: Collective, workspace: Workspace) -> None:
    command = ["workload=collectives", f"space.collective={name}", "space.kib=1024,262144", "gpus=2", "search=grid"]
    result = workspace.run(*command, timeout_s=400)
    assert result.code == 0 and "2 complete" in result.out, result.out + result.err
