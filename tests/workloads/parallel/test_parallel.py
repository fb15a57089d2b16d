"""A model that is laid out over ranks trains as it does in one process: real processes, gloo between them."""

from __future__ import annotations

import faulthandler
import json
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
from workloads import device as devices
from workloads.api.contract import Infeasible, Rank
from workloads.api.trial import run_trial
from workloads.distributed import process_group
from workloads.llama.model import Llama, rope_table
from workloads.llama.shapes import MODELS
from workloads.parallel.apply import gathered_gradients, groups_of, stages_of
from workloads.parallel.communication import shares
from workloads.parallel.layout import TORCH, Layout
from workloads.parallel.stage import random_weights
from workloads.parallel.train import Trainer

CPU = torch.device("cpu")
SHAPE = replace(MODELS["llama_tiny"], layers=4)
LENGTH, BATCH, STEPS = 32, 8, 2
RANKS = 8
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
    Layout(pipeline=2, shard=2, tensor=2),
]
LAYOUTS = [replace(layout, global_batch=BATCH) for layout in LAYOUTS]


Trained = tuple[list[float], dict[str, Tensor]]  # losses, and the first step's gradients


def tokens() -> Tensor:
    return torch.randint(0, SHAPE.vocabulary, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(1))


def train(layout: Layout, rank: Rank, compiled: bool, recipe: str) -> Trained:
    """The losses of a few steps, and the gradients of the first, whole, of this rank's stages."""
    device = devices.device_of(rank)
    with process_group(rank, device):
        groups = groups_of(layout, device.type)
        weights = random_weights(0, CPU)
        stages = stages_of(
            *(SHAPE, layout, groups, LENGTH, device, torch.float32, weights), compiled=compiled, recipe=recipe
        )
        trainer = Trainer(stages, layout, groups, device, learning_rate=1e-3)
        losses = [float(trainer.gradients(tokens()))]
        gradients = {name: g.to(CPU, copy=True) for name, g in gathered_gradients(stages, SHAPE, layout.tensor).items()}
        trainer.update()
        return losses + [float(trainer.step(tokens())) for _ in range(STEPS - 1)], gradients


def serve(number: int, device: str, port: int, calls: Any, answers: Any) -> None:
    torch.set_num_threads(1)
    while (call := calls.get()) is not None:
        faulthandler.dump_traceback_later(90)
        turn, layout, compiled, recipe = call
        rank = Rank(
            number, layout.world_size, device, rendezvous=f"127.0.0.1:{port + layout.world_size}", sequence_number=turn
        )
        try:
            answers.put((number, train(layout, rank, compiled, recipe)))
        except Exception:
            answers.put((number, traceback.format_exc()))
        faulthandler.cancel_dump_traceback_later()


class Ranks:
    """Processes that train one layout after the other, each in a process group of its own."""

    def __init__(self, count: int, device: str = "cpu") -> None:
        # Where torch is imported, starting anew takes seconds each; what has seen a GPU cannot be forked.
        self._device = device
        start: Any = multiprocessing.get_context("fork" if device == "cpu" else "spawn")
        self._calls, self._answers, self._turn = [start.Queue() for _ in range(count)], start.Queue(), 0
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._processes = [
            start.Process(target=serve, args=(n, device, port, calls, self._answers), daemon=True)
            for n, calls in enumerate(self._calls)
        ]
        with pytest.MonkeyPatch.context() as patch:
            for n, process in enumerate(self._processes):
                if device == "cuda":
                    patch.setenv("CUDA_VISIBLE_DEVICES", str(n))  # as a worker sees it
                process.start()

    def train(
        self, layout: Layout, *, compiled: bool = False, recipe: str = ""
    ) -> list[tuple[list[float], dict[str, Tensor]]]:
        self._turn += 1
        for calls in self._calls[: layout.world_size]:
            calls.put((self._turn, layout, compiled, recipe))
        answers = {}
        for _ in range(layout.world_size):
            number, answer = self._answers.get(timeout=100)
            if isinstance(answer, str):  # the others may wait for it for ever
                self.close()
                self.__init__(len(self._processes), self._device)  # type: ignore[misc]
                pytest.fail(answer)
            answers[number] = answer
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
def plain() -> Trained:
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
def test_every_layout_trains_like_one_process(layout: Layout, ranks: Ranks, plain: Trained) -> None:
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
def test_compiled_layouts_train_like_one_process_too(layout: Layout, ranks: Ranks, plain: Trained) -> None:
    same(ranks.train(layout, compiled=True), plain)


@pytest.fixture(scope="module")
def gpus() -> Iterator[Ranks]:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    found = Ranks(2, "cuda")
    yield found
    found.close()


@pytest.mark.gpu
@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout.world_size == 2], ids=str)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_layouts_over_two_gpus_train_like_one_processor(
    layout: Layout, compiled: bool, gpus: Ranks, plain: Trained
) -> None:
    if layout.schedule == "zero_bubble" and (compiled or TORCH < (2, 13)):
        pytest.skip("zero bubble is not compiled, and not for torch before 2.13")
    same(gpus.train(layout, compiled=compiled), plain, within=2e-5)


def same(
    found: list[Trained],
    plain: Trained,
    within: float = 1e-5,
) -> None:
    gradients: dict[str, Tensor] = {}
    for losses, mine in found:
        assert losses == pytest.approx(plain[0], abs=within)
        gradients |= mine
    assert gradients.keys() == plain[1].keys()
    for name, wanted in plain[1].items():
        error = (gradients[name] - wanted).abs().max() / wanted.abs().max()
        assert error < within, name


def test_fp8_layers_train_alike_in_every_layout_and_not_quite_as_fp32(ranks: Ranks, plain: Trained) -> None:
    one = Layout(micro_batch=2, global_batch=BATCH)
    (alone,) = ranks.train(one, recipe="fp8_tensorwise")
    same(ranks.train(replace(one, shard=2), recipe="fp8_tensorwise"), alone)
    same(ranks.train(replace(one, pipeline=2), recipe="fp8_tensorwise"), alone)
    assert alone[0] == pytest.approx(plain[0], abs=0.02)
    assert alone[0] != pytest.approx(plain[0], abs=1e-6)


def test_shares_of_a_step_are_of_time_that_nothing_else_takes() -> None:
    kernels = [
        ("gemm", (0.0, 4.0)),
        ("ncclDevKernel", (3.0, 6.0)),
        ("gemm", (8.0, 9.0)),
        ("ncclDevKernel", (8.5, 10.0)),
    ]
    found = shares(kernels)
    assert found["communication_share"] == pytest.approx(0.45)
    assert found["exposed_share"] == pytest.approx(0.3)
    assert found["idle_share"] == pytest.approx(0.5)


def test_an_illegal_layout_is_infeasible_before_anybody_waits_for_anybody() -> None:
    with pytest.raises(Infeasible, match="= 2 ranks, there are 4"):
        run_trial("parallel", {"model": "llama_tiny", "dtype": "fp32", "shard": 2}, Rank(0, 4, ranks_per_node=4))


def test_a_tied_model_trains_over_tensor_parallel_ranks_too() -> None:
    """Its head is its embedding, so both are divided alike; one rank by itself shows that it is built."""
    shape = replace(SHAPE, tied=True)
    with process_group(Rank(), CPU):
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
        # Blocks with whole weights have a backward pass and kernels of their own.
        kernels = "cpu" if run.data.params["shard"] == "2" else "scaled_dot_product_attention"
        assert run.data.tags["attention"] == kernels
    assert "foresaw  what was predicted is" in done.out
    (parent,) = place.runs("sweep")
    assert parent.data.metrics["predicted_error"] > 0
    projected = json.loads(parent.data.tags["projected_tokens_per_s"])
    assert list(projected) == ["2", "4", "8", "16"] and projected["4"] > 1.5 * projected["2"] > 0
    assert "the batch grows with the copies" in parent.data.tags["projection_assumes"]
