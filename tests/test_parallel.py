"""A model that is laid out over ranks trains as it does in one process: real processes, gloo between them."""

from __future__ import annotations

import multiprocessing
import socket
import traceback
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conftest import Place
from workloads.contract import Infeasible, Rank
from workloads.gang import together
from workloads.llama.model import Llama, rope_table
from workloads.llama.shapes import MODELS
from workloads.parallel.apply import gathered_gradients, groups_of, stages_of
from workloads.parallel.layout import Layout
from workloads.parallel.stage import random_weights
from workloads.parallel.train import Trainer
from workloads.trial import run_trial

CPU = torch.device("cpu")
SHAPE = replace(MODELS["llama_tiny"], layers=4)
LENGTH, BATCH, STEPS = 32, 8, 2
RANKS = 4
LAYOUTS = [
    Layout(),
    Layout(shard=2, micro_batch=2),
    Layout(shard=2, micro_batch=2, reshard=False),
    Layout(replicate=2, micro_batch=2),
    Layout(replicate=2, shard=2, checkpointing="full"),
    Layout(tensor=2, micro_batch=4),
    Layout(tensor=2, micro_batch=4, checkpointing="selective"),
    Layout(context=2, micro_batch=4),
    Layout(context=4, micro_batch=4),
    Layout(context=2, tensor=2, micro_batch=4),
    Layout(context=2, shard=2, checkpointing="full"),
    Layout(shard=2, tensor=2, micro_batch=2, checkpointing="selective"),
    Layout(pipeline=2, micro_batch=2),
    Layout(pipeline=4, micro_batch=2),
    Layout(pipeline=2, stages=2, schedule="interleaved", micro_batch=2),
    Layout(pipeline=2, stages=2, schedule="zero_bubble", micro_batch=2),
    Layout(pipeline=2, shard=2, checkpointing="full"),
    Layout(pipeline=2, shard=2, stages=2, schedule="interleaved"),
    Layout(pipeline=2, shard=2, stages=2, schedule="zero_bubble", reshard=False),
    Layout(replicate=2, tensor=2),
    Layout(pipeline=2, tensor=2, micro_batch=2),
    Layout(pipeline=2, context=2, micro_batch=2),
]
LAYOUTS = [replace(layout, global_batch=BATCH) for layout in LAYOUTS]


def tokens() -> Tensor:
    return torch.randint(0, SHAPE.vocabulary, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(1))


def train(layout: Layout, rank: Rank, compiled: bool) -> tuple[list[float], dict[str, Tensor]]:
    """The losses of a few steps, and the gradients of the first, whole, of this rank's stages."""
    with together(rank, CPU):
        groups = groups_of(layout, "cpu")
        weights = random_weights(0, CPU)
        stages = stages_of(SHAPE, layout, groups, LENGTH, CPU, torch.float32, weights, compiled=compiled)
        trainer = Trainer(stages, layout, groups, CPU, learning_rate=1e-3)
        losses = [float(trainer.gradients(tokens()))]
        gradients = {name: g.clone() for name, g in gathered_gradients(stages, SHAPE, layout.tensor).items()}
        trainer.update()
        return losses + [float(trainer.step(tokens())) for _ in range(STEPS - 1)], gradients


def serve(number: int, port: int, calls: Any, answers: Any) -> None:
    torch.set_num_threads(1)
    while (call := calls.get()) is not None:
        turn, layout, compiled = call
        rank = Rank(number, layout.world_size, meeting=f"127.0.0.1:{port + layout.world_size}", turn=turn)
        try:
            answers.put((number, train(layout, rank, compiled)))
        except Exception:
            answers.put((number, traceback.format_exc()))


class Ranks:
    """Processes that train one layout after the other, each in a process group of its own."""

    def __init__(self, count: int) -> None:
        fork = multiprocessing.get_context("fork")  # torch is imported; starting anew takes seconds each
        self._calls, self._answers, self._turn = [fork.Queue() for _ in range(count)], fork.Queue(), 0
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._processes = [
            fork.Process(target=serve, args=(n, port, calls, self._answers), daemon=True)
            for n, calls in enumerate(self._calls)
        ]
        for process in self._processes:
            process.start()

    def train(self, layout: Layout, *, compiled: bool = False) -> list[tuple[list[float], dict[str, Tensor]]]:
        self._turn += 1
        for calls in self._calls[: layout.world_size]:
            calls.put((self._turn, layout, compiled))
        answers = dict(self._answers.get(timeout=300) for _ in range(layout.world_size))
        assert not any(isinstance(answer, str) for answer in answers.values()), next(iter(answers.values()))
        return [answers[n] for n in range(layout.world_size)]

    def close(self) -> None:
        for process in self._processes:
            process.kill()


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    found = Ranks(RANKS)
    yield found
    found.close()


@pytest.fixture(scope="module")
def plain() -> tuple[list[float], dict[str, Tensor]]:
    """What PyTorch makes of the whole model in one process, with no part of what is tested."""
    model, weights = Llama(SHAPE), random_weights(0, CPU)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights(name, tuple(parameter.shape)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    rope, losses, gradients = rope_table(SHAPE, LENGTH, CPU), [], dict[str, Tensor]()
    for _ in range(STEPS):
        loss = model(tokens()[:, :-1], tokens()[:, 1:], rope)
        loss.backward()
        losses.append(float(loss.detach()))
        gradients = gradients or {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
    return losses, gradients


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout_trains_like_one_process(
    layout: Layout, ranks: Ranks, plain: tuple[list[float], dict[str, Tensor]]
) -> None:
    same(ranks.train(layout), plain)


COMPILED = [
    Layout(shard=2, micro_batch=4, checkpointing="selective"),
    Layout(tensor=2, micro_batch=4),
    Layout(tensor=2, shard=2, micro_batch=4),
    Layout(tensor=2, micro_batch=4, checkpointing="full"),
    Layout(tensor=2, micro_batch=4, checkpointing="selective"),
    Layout(context=2, micro_batch=4),
    Layout(pipeline=2, micro_batch=4),
]


@pytest.mark.soak
@pytest.mark.parametrize("layout", [replace(layout, global_batch=BATCH) for layout in COMPILED], ids=str)
def test_compiled_layouts_train_like_one_process_too(
    layout: Layout, ranks: Ranks, plain: tuple[list[float], dict[str, Tensor]]
) -> None:
    same(ranks.train(layout, compiled=True), plain)


def same(found: list[tuple[list[float], dict[str, Tensor]]], plain: tuple[list[float], dict[str, Tensor]]) -> None:
    gradients: dict[str, Tensor] = {}
    for losses, mine in found:
        assert losses == pytest.approx(plain[0], abs=1e-5)
        gradients |= mine
    assert gradients.keys() == plain[1].keys()
    for name, wanted in plain[1].items():
        error = (gradients[name] - wanted).abs().max() / wanted.abs().max()
        assert error < 1e-5, name


def test_an_illegal_layout_is_infeasible_before_anybody_waits_for_anybody() -> None:
    with pytest.raises(Infeasible, match="= 2 ranks, there are 4"):
        run_trial("parallel", {"model": "llama_tiny", "dtype": "fp32", "shard": 2}, Rank(0, 4, ranks_per_node=4))


def test_a_tied_model_trains_over_tensor_parallel_ranks_too() -> None:
    """Its head is its embedding, so both are divided alike; one rank by itself shows that it is built."""
    shape = replace(SHAPE, tied=True)
    with together(Rank(), CPU):
        layout = Layout(global_batch=2)
        groups = groups_of(layout, "cpu")
        stages = stages_of(shape, layout, groups, LENGTH, CPU, torch.float32, random_weights(0, CPU), compiled=False)
        trainer = Trainer(stages, layout, groups, CPU, learning_rate=1e-3)
        losses = [float(trainer.step(tokens()[:2])) for _ in range(3)]
    assert losses[0] > losses[1] > losses[2]


def test_a_sweep_finds_a_layout_and_says_how_well_it_foresaw(place: Place) -> None:
    """Over real gangs: process groups come and go between trials of the same two workers."""
    fixed = ["space.micro_batch=4", "space.checkpointing=none", "space.context=1", "space.pipeline=1"]
    fixed += ["space.replicate=1", "space.steps=3"]
    done = place.run("workload=parallel", "gpus=2", "finals.top=0", "search=grid", "space.reshard=true", *fixed)
    assert done.code == 0, done.err
    runs = place.runs("trial")
    assert sorted((run.data.params["shard"], run.data.params["tensor"]) for run in runs) == [("1", "2"), ("2", "1")]
    for run in runs:
        metrics = run.data.metrics
        assert metrics["predicted_tokens_per_s"] > 0 and metrics["tokens_per_s_per_gpu"] > 0
        assert metrics["loss"] == pytest.approx(runs[0].data.metrics["loss"], abs=1e-4)
        assert sum(value for name, value in metrics.items() if name.startswith("calls_")) > 0
    assert "foresaw  what was predicted is" in done.out
    (parent,) = place.runs("sweep")
    assert parent.data.metrics["predicted_error"] > 0
