"""`workload=parallel`: the tokens of a step, trials of forked processes with gloo between them, and a sweep."""

import json
import multiprocessing
import socket
import traceback
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import Workspace
from workloads.api.contract import Measurement, Pruned, Rank
from workloads.api.trial import run_trial
from workloads.models.flops import document_lengths
from workloads.parallel.train import TokenSource

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


def test_a_rank_trains_alone_in_a_layout_of_one_gpu() -> None:
    measured = run_trial("parallel", FIXED, Rank(1, 2, ranks_per_node=2, rendezvous="127.0.0.1:1"))
    assert measured.tokens_per_step == 8 * 64 and measured.metrics["loss"] < measured.metrics["first_loss"]


@pytest.mark.soak  # `make test` runs such trials in test_run.py, and a sweep with estimates in test_command.py
def test_a_sweep_over_layouts_reports_how_well_they_were_predicted(workspace: Workspace) -> None:
    """The same two workers run all trials, each in a new process group."""
    fixed = ["space.micro_batch=4", "space.checkpointing=none", "space.cp=1", "space.pp=1"]
    fixed += ["space.dp_replicate=1", "space.steps=3"]
    result = workspace.run(
        "workload=parallel", "gpus=2", "finals.top=0", "search=grid", "space.reshard_after_forward=true", *fixed
    )
    assert result.code == 0, result.err
    runs = workspace.runs("trial")
    assert sorted((run.data.params["dp_shard"], run.data.params["tp"]) for run in runs) == [("1", "2"), ("2", "1")]
    for run in runs:
        metrics = run.data.metrics
        assert metrics["predicted_tokens_per_s"] > 0 and metrics["tokens_per_s_per_gpu"] > 0
        assert metrics["loss"] == pytest.approx(runs[0].data.metrics["loss"], abs=1e-4)
        assert sum(value for name, value in metrics.items() if name.startswith("calls_")) > 0
        assert run.data.tags["attention"] == "scaled_dot_product_attention"
    assert "model    estimates are" in result.out
    (parent,) = workspace.runs("sweep")
    assert parent.data.metrics["predicted_error"] > 0
    projected = json.loads(parent.data.tags["projected_tokens_per_s"])
    assert list(projected) == ["2", "4", "8", "16"] and projected["4"] > 1.5 * projected["2"] > 0
    assert projected["2"] == pytest.approx(max(run.data.metrics["tokens_per_s"] for run in runs))
    assert "the batch grows with the replicas" in parent.data.tags["projection_assumes"]


@given(st.integers(2, 200_000), st.integers(1, 5), st.integers(0, 2**31))
def test_the_parts_of_all_ranks_are_the_whole_batch(vocabulary: int, ranks: int, seed: int) -> None:
    source = TokenSource(vocabulary, 8, seed)
    whole = source.draw(3, range(2 * ranks)).tokens
    parts = [source.draw(3, range(2 * rank, 2 * rank + 2)).tokens for rank in range(ranks)]
    assert torch.equal(whole, torch.cat(parts)) and whole.shape == (2 * ranks, 9) and whole.dtype == torch.int64
    assert int(whole.min()) >= 0 and int(whole.max()) < vocabulary
    assert vocabulary < 1000 or not torch.equal(whole, source.draw(4, range(2 * ranks)).tokens)


def test_tokens_are_of_the_whole_vocabulary_with_the_shares_of_zipfs_law() -> None:
    ids = TokenSource(128_256, 50_000, seed=0).draw(0, range(8)).tokens.flatten()
    assert int(ids.max()) > 128_000
    # The share of the ids below n is ln(n + 1) / ln(vocabulary + 1).
    for below, share in ((1, 0.0589), (1023, 0.5893), (32_000, 0.8820)):
        assert abs(float((ids < below).float().mean()) - share) < 0.003


def test_every_sequence_has_the_same_documents_in_an_order_of_its_own() -> None:
    whole = TokenSource(512, 64, seed=0).draw(0, range(4))
    packed = TokenSource(512, 64, seed=0, document_tokens=10).draw(0, range(4))
    assert torch.equal(packed.tokens, whole.tokens) and whole.document_lengths is None
    assert packed.document_lengths is not None
    rows = packed.document_lengths.tolist()
    assert all(sorted(row) == list(document_lengths(64, 10)) for row in rows)
    assert len({tuple(row) for row in rows}) == 4
