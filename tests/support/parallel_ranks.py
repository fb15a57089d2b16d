"""Processes that train a divided model with gloo or NCCL between them, and the same training in one process."""

import faulthandler
import importlib.util
import itertools
import multiprocessing
import socket
import traceback
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partialmethod
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.support.gloo_fp8 import fp8_over_gloo
from tests.support.llama import Llama
from workloads.api.contract import Rank
from workloads.instruments import device as devices
from workloads.instruments.distributed import process_group
from workloads.instruments.torch_internals import gather_numbers
from workloads.layouts.layout import Layout
from workloads.llama.model import rope_table
from workloads.models.model import MODELS, Model
from workloads.parallel.apply import (
    ModelSpec,
    build_groups,
    build_stages,
    fp8_gathers,
    separate_group_names,
)
from workloads.parallel.profiling import profile_step
from workloads.parallel.stage import Stage, build_initializer, named_llama_parameters
from workloads.parallel.tensor import reorder_fused_rows
from workloads.parallel.train import Batch, TokenSource, Trainer, local_sequences

CPU = torch.device("cpu")
SHAPE = replace(MODELS["llama_tiny"], layers=4)
GPT_OSS = replace(
    MODELS["experts_tiny"],
    layers=2,
    gpt_oss=True,
    qk_norm="",
    qkv_bias=True,
    window=16,
    full_layers=(1,),
    dense_layers=(),
    intermediate_size=0,
    shared_expert_intermediate_size=0,
    shared_expert_gate=False,
)
LENGTH, BATCH, STEPS = 32, 8, 2


@dataclass(frozen=True)
class Trained:
    """The losses of all steps, and the first step's gradients and their norm."""

    losses: list[float]
    gradients: dict[str, Tensor]
    norm: float
    fp8_gathers: dict[str, bool] = field(default_factory=dict)  # as in `workloads.parallel.apply.fp8_gathers`
    graphs: int = 0  # what compiled blocks are; each may serve many blocks
    # collectives of the last step, as in `profile_step`, where blocks are compiled or weights kept
    calls: dict[str, float] = field(default_factory=dict)
    rank_imbalances: list[float] = field(default_factory=list)  # of each block's experts


def draw_batch(sequences: range = range(BATCH), document_tokens: int = 0) -> Batch:
    """Return sequences of a batch of uniform tokens, packed with documents."""
    drawn = TokenSource(SHAPE.vocabulary, LENGTH, 0, document_tokens).draw(0, sequences)
    return Batch(tokens()[sequences.start : sequences.stop], drawn.document_lengths)


def tokens() -> Tensor:
    return torch.randint(0, SHAPE.vocabulary, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(1))


@dataclass(frozen=True)
class Call:
    """A layout for the processes of `Ranks` to train."""

    sequence_number: int  # differs between calls
    layout: Layout
    spec: ModelSpec
    exact_fp8_sums: bool = False  # as in `fp8_over_gloo`
    backend: str = ""  # of the compiler; empty for PyTorch's own
    keeps_weights: bool = False  # as in `workloads.parallel.apply.set_gradient_sync`


def initialize(name: str, size: tuple[int, ...]) -> Tensor:
    """Return a parameter's initial values, the embedding's so small that the gradients have to be clipped."""
    values = build_initializer(0, CPU)(name, size)
    return values / 50 if name == "embedding.weight" else values


def build_llama(shape: Model) -> Llama:
    """Return the model with these initial values."""
    model = Llama(shape)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(initialize(name, tuple(parameter.shape)))
    return model


def gather_gradients(stages: list[Stage], shape: Model, tp: int) -> dict[str, Tensor]:
    """Return the whole gradients of this rank's stages by name, as one process has them. All ranks have to call it."""
    gradients = {}
    for stage in stages:
        divided_experts = stage.divided_experts
        for name, parameter in named_llama_parameters(stage).items():
            assert parameter.grad is not None
            full = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
            if experts := divided_experts.get(parameter):
                full = gather_numbers(full, 0, experts.group_name)
            order = reorder_fused_rows(name, torch.arange(len(full)), shape, tp)
            gradients[name] = full[order.argsort()]
    return gradients


def train(call: Call, rank: Rank) -> Trained:
    """Train a few steps. Returns the losses, and the whole gradients of the first step of this rank's stages."""
    device, layout = devices.device_of(rank), call.layout
    is_emulated = call.spec.recipe.startswith("fp8") and device.type == "cpu"
    emulation = fp8_over_gloo(exact_sums=call.exact_fp8_sums) if is_emulated else nullcontext()
    stats: dict[str, int] = {}
    if call.spec.compiled:
        from torch._dynamo.utils import counters  # takes 2 s

        torch.compiler.reset()  # as a trial does
        stats = counters["stats"]
        stats.clear()
    with process_group(rank, device), emulation, pytest.MonkeyPatch.context() as patch:
        if call.backend:
            patch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend=call.backend))
        if layout.tp_overlap == "async":
            separate_group_names(call.sequence_number)
        groups = build_groups(layout, device.type)
        stages = build_stages(call.spec, layout, groups, device, initialize)
        trainer = Trainer(stages, layout, groups, device, learning_rate=1e-3, keeps_weights=call.keeps_weights)
        local = draw_batch(local_sequences(layout, groups), call.spec.document_tokens)
        losses = [float(trainer.compute_gradients(local))]
        gradients = gather_gradients(stages, call.spec.shape, layout.tp)
        gradients = {name: gradient.to(CPU, copy=True) for name, gradient in gradients.items()}
        trainer.update()
        norm = float(trainer.gradient_norm)  # type: ignore[arg-type]
        calls: dict[str, float] = {}
        with profile_step(device, calls) if call.spec.compiled or call.keeps_weights else nullcontext():
            losses += [float(trainer.step(local)) for _ in range(STEPS - 1)]
        graphs = stats.get("unique_graphs", 0)
        imbalances = [experts.imbalances[1] for stage in stages for experts in stage.experts.values()]
        return Trained(losses, gradients, norm, fp8_gathers(stages[0]), graphs, calls, imbalances)


def serve(number: int, device: str, port: int, calls: Any, answers: Any) -> None:
    torch.set_num_threads(1)
    while (call := calls.get()) is not None:
        faulthandler.dump_traceback_later(150)
        world_size = call.layout.gpus
        rank = Rank(
            number,
            world_size,
            device,
            rendezvous=f"127.0.0.1:{port + world_size}",
            sequence_number=call.sequence_number,
        )
        try:
            answers.put((number, train(call, rank)))
        except Exception:
            answers.put((number, traceback.format_exc()))
        faulthandler.cancel_dump_traceback_later()


class Ranks:
    """Processes that train one layout after the other, each in a new process group."""

    def __init__(self, count: int, device: str = "cpu") -> None:
        # Importing torch and torchao in a new process takes seconds; a process that has used a GPU cannot be forked.
        if importlib.util.find_spec("torchao"):
            importlib.import_module("torchao.float8.float8_ops")
        self._device = device
        context: Any = multiprocessing.get_context("fork" if device == "cpu" else "spawn")
        self._calls = [context.Queue() for _ in range(count)]
        self._answers = context.Queue()
        self._sequence_number = 0
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._processes = [
            context.Process(target=serve, args=(n, device, port, calls, self._answers), daemon=True)
            for n, calls in enumerate(self._calls)
        ]
        with pytest.MonkeyPatch.context() as patch:
            for n, process in enumerate(self._processes):
                if device == "cuda":
                    patch.setenv("CUDA_VISIBLE_DEVICES", str(n))  # as a worker sees it
                process.start()

    def train(
        self,
        layout: Layout,
        *,
        exact_fp8_sums: bool = False,
        backend: str = "",
        keeps_weights: bool = False,
        **fields: Any,
    ) -> list[Trained]:
        """Train on as many processes as the layout has ranks. Returns each rank's result."""
        self._sequence_number += 1
        spec = ModelSpec(**({"shape": SHAPE, "sequence_length": LENGTH, "dtype": torch.float32} | fields))
        for calls in self._calls[: layout.gpus]:
            calls.put(Call(self._sequence_number, layout, spec, exact_fp8_sums, backend, keeps_weights))
        results: dict[int, Trained] = {}
        for _ in range(layout.gpus):
            number, answer = self._answers.get(timeout=160)
            if isinstance(answer, str):  # the other ranks may wait for this one forever
                self.close()
                self.__init__(len(self._processes), self._device)  # type: ignore[misc]
                pytest.fail(answer)
            results[number] = answer
        return [results[number] for number in range(layout.gpus)]

    def close(self) -> None:
        for process in self._processes:
            process.kill()


def train_in_one_process(batch: Batch, shape: Model = SHAPE) -> Trained:
    """Train the whole model by PyTorch in one process, each document alone, with nothing of what is tested."""
    lengths = [[LENGTH]] * BATCH if batch.document_lengths is None else batch.document_lengths.tolist()
    documents = [
        (row[None, :-1][:, stop - length : stop], row[None, 1:][:, stop - length : stop])
        for row, row_lengths in zip(batch.tokens, lengths, strict=True)
        for stop, length in zip(itertools.accumulate(row_lengths), row_lengths, strict=True)
    ]
    model = build_llama(shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    rope = rope_table(shape, LENGTH, CPU)
    losses: list[float] = []
    gradients: dict[str, Tensor] = {}
    norms = []
    for _ in range(STEPS):
        losses.append(0.0)
        for inputs, targets in documents:
            loss = model(inputs, targets, rope[:, : inputs.shape[1]], inputs.numel() / (BATCH * LENGTH))
            loss.backward()
            losses[-1] += float(loss.detach())
        gradients = gradients or {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
    assert norms[0] > 1.0  # so that clipping has an effect
    return Trained(losses, gradients, norms[0])


def assert_same_training(
    trained: list[Trained], reference: Trained, tolerance: float = 1e-5, later_tolerance: float = 1e-5
) -> None:
    """Check that every rank has the reference's losses, and that the ranks' gradients together are the reference's.

    `later_tolerance` is that of losses after the first step.
    """
    gradients: dict[str, Tensor] = {}
    for rank in trained:
        assert rank.losses[0] == pytest.approx(reference.losses[0], abs=tolerance)
        assert rank.losses == pytest.approx(reference.losses, abs=max(tolerance, later_tolerance))
        assert rank.norm == pytest.approx(reference.norm, rel=tolerance)
        gradients |= rank.gradients
    assert gradients.keys() == reference.gradients.keys()
    for name, gradient in reference.gradients.items():
        error = (gradients[name] - gradient).abs().max() / gradient.abs().max()
        assert error < tolerance, name
