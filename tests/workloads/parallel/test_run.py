"""Trials of `workload=parallel` over two ranks, without Ray: forked processes, with gloo between them."""

import multiprocessing
import socket
import traceback
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from workloads.api.contract import Measurement, Pruned, Rank
from workloads.api.trial import run_trial

FIXED = {"model": "llama_tiny", "sequence_length": 64, "global_batch": 8, "micro_batch": 4, "compile": False}
FIXED |= {"dtype": "fp32", "steps": 2}
# Checkpointing is read back from the blocks.
TRIALS = [
    FIXED | {"tp": 2, "checkpointing": "full", "checkpointing_freq": 2},
    FIXED | {"dp_shard": 2, "block": "manual"},
]


class Pruner:
    """Ends a trial after its second step."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def report(self, step: int, metrics: Mapping[str, float]) -> bool:
        assert metrics["tokens_per_s"] > 0 and metrics["tflops"] > 0 and metrics["loss"] > 0
        self.steps.append(step)
        return step == 2

    def finish(self) -> None: ...

    def is_finished(self) -> bool:
        return False


def run_trials(number: int, rendezvous: str, results: Any) -> None:
    """Run all trials as one of two ranks, and put their measurements or a traceback into `results`."""
    torch.set_num_threads(1)
    try:
        ranks = [
            Rank(number, 2, ranks_per_node=2, rendezvous=rendezvous, sequence_number=n + 1) for n in range(len(TRIALS))
        ]
        measured = [run_trial("parallel", trial, rank) for trial, rank in zip(TRIALS, ranks, strict=True)]
        pruner = Pruner()
        with pytest.raises(Pruned):  # on both ranks, though the first one alone reports
            run_trial("parallel", TRIALS[0], replace(ranks[0], sequence_number=len(TRIALS) + 1, reporter=pruner))
        assert pruner.steps == ([] if number else [1, 2])
        results.put(measured)
    except Exception:
        results.put(traceback.format_exc())


@pytest.mark.long(10)
def test_trials_of_different_layouts_follow_each_other_in_the_same_two_processes() -> None:
    fork: Any = multiprocessing.get_context("fork")  # importing torch in a new process takes seconds
    results = fork.Queue()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        rendezvous = f"127.0.0.1:{free.getsockname()[1]}"
    processes = [fork.Process(target=run_trials, args=(n, rendezvous, results), daemon=True) for n in range(2)]
    for process in processes:
        process.start()
    try:
        by_rank: list[list[Measurement]] = [results.get(timeout=170) for _ in processes]
    finally:
        for process in processes:
            process.kill()
    assert not any(isinstance(answer, str) for answer in by_rank), by_rank
    loss = by_rank[0][0].metrics["loss"]
    for measurements in by_rank:
        for measurement in measurements:
            assert len(measurement.step_times_s) == 2
            assert measurement.metrics["loss"] == pytest.approx(loss, abs=1e-4)
            assert measurement.metrics["loss"] < measurement.metrics["first_loss"]
            assert sum(value for name, value in measurement.metrics.items() if name.startswith("calls_")) > 0
            assert measurement.executed["state"] == "fp32" and measurement.metrics["gradient_norm"] > 0
        # A manual backward pass has kernels of its own.
        attention = [measurement.machine_info["attention"] for measurement in measurements]
        assert attention == ["scaled_dot_product_attention", "cpu"]
        assert [measurement.executed["block"] for measurement in measurements] == ["pytorch", "manual"]
    assert sorted(trials[0].tokens_per_step for trials in by_rank) == [0, 8 * 64]  # rank 0 reports those of all
