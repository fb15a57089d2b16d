"""Train a model that a layout divides over ranks, step by step."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from workloads.estimator.own_memory import LOSS_CHUNK_TOKENS
from workloads.layouts.layout import Layout
from workloads.llama.model import next_token_loss
from workloads.parallel.apply import Groups
from workloads.parallel.batches import Batch
from workloads.parallel.clipping import clip_gradients
from workloads.parallel.context import local_positions
from workloads.parallel.fsdp import precompute_fp8_scales, set_gradient_sync
from workloads.parallel.graphs import GraphedPasses
from workloads.parallel.loss import vocab_parallel_loss
from workloads.parallel.schedules import NAMES, build_schedule
from workloads.parallel.stage import Stage


class Trainer:
    """Runs forward and backward passes of this rank's stages, and AdamW over its parameters.

    Attributes:
        gradient_norm: the norm of the last step's gradients, of all ranks; None where gradients are not clipped.
    """

    def __init__(
        self,
        stages: list[Stage],
        layout: Layout,
        groups: Groups,
        device: torch.device,
        learning_rate: float,
        *,
        clips: bool = True,
    ) -> None:
        self.stages, self.layout, self._groups, self._device = stages, layout, groups, device
        self._clips = clips
        self.gradient_norm: Tensor | None = None
        self._parameters = [parameter for stage in stages for parameter in stage.parameters()]
        self._optimizer = torch.optim.AdamW(
            self._parameters, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.1, fused=device.type == "cuda"
        )
        self._schedule: Any = None
        if layout.pp > 1:
            self._schedule = build_schedule(stages, layout, groups.mesh["pp"], device, self._build_loss(stages[-1]))
        self._run_passes: Any = self._run_pipeline if self._schedule else self._run_microbatches
        if layout.cuda_graph:
            self._run_passes = GraphedPasses(self._run_microbatches, self._parameters)

    @property
    def executed_cuda_graph(self) -> bool:
        """Whether a recording of the passes is replayed."""
        return isinstance(self._run_passes, GraphedPasses) and self._run_passes.is_recorded

    @property
    def executed_schedule(self) -> str:
        """The name of the pipeline schedule that runs; `1f1b` without a pipeline."""
        return NAMES[type(self._schedule)] if self._schedule else "1f1b"

    def step(self, batch: Batch) -> Tensor:
        """Train one step on this rank's sequences. Returns the mean loss of all ranks."""
        loss = self.compute_gradients(batch)
        self.update()
        return loss

    def update(self) -> None:
        """Clip the gradients, apply and clear them."""
        if self._clips:
            self.gradient_norm = clip_gradients(self._parameters, self._groups.mesh["pp"])
        self._optimizer.step()
        self._optimizer.zero_grad()
        for stage in self.stages:
            precompute_fp8_scales(stage)

    def state_dtypes(self) -> set[torch.dtype]:
        """Return the data types of the parameters and of both optimizer states of each, after a step."""
        states = [state[name] for state in self._optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
        return {tensor.dtype for tensor in (*self._parameters, *states)}

    def compute_gradients(self, batch: Batch) -> Tensor:
        """Run the forward and backward passes of this rank's sequences. Returns the mean loss of all ranks."""
        batch = batch.to(self._device)
        inputs, targets = self._split_targets(batch.tokens)
        loss = self._run_passes(inputs, targets, batch.document_lengths)
        if loss is None:  # only the last pipeline ranks have one
            sum_and_count = torch.tensor([0.0, 0.0], device=self._device)
        else:
            sum_and_count = torch.stack([loss, loss.new_ones(())])
        dist.all_reduce(sum_and_count)
        return sum_and_count[0] / sum_and_count[1]

    def _split_targets(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return inputs and targets [sequences, length], of this rank's part of each sequence."""
        layout = self.layout
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        if self._groups.cp_group is not None:
            positions = local_positions(inputs.shape[1], layout.cp, dist.get_rank(self._groups.cp_group))
            positions = positions.to(self._device)
            inputs, targets = inputs[:, positions], targets[:, positions]
        return inputs.contiguous(), targets.contiguous()

    def _run_microbatches(self, inputs: Tensor, targets: Tensor, document_lengths: Tensor | None) -> Tensor:
        """Run the micro-batches one after the other, without a pipeline. Returns their mean loss."""
        count, loss = self.layout.microbatches, torch.zeros((), device=self._device)
        loss_function = self._build_loss(self.stages[0])
        lengths = [None] * count if document_lengths is None else document_lengths.chunk(count)
        for n, (x, t, d) in enumerate(zip(inputs.chunk(count), targets.chunk(count), lengths, strict=True)):
            set_gradient_sync(
                self.stages,
                is_last_microbatch=n == count - 1,
                reshard_after_forward=self.layout.reshard_after_forward,
            )
            microbatch_loss = loss_function(self.stages[0](x, d), t) / count
            microbatch_loss.backward()
            loss += microbatch_loss.detach()
        return loss

    def _run_pipeline(self, inputs: Tensor, targets: Tensor, document_lengths: Tensor | None) -> Tensor | None:
        """Run a step through the pipeline. Returns the mean loss on the last pipeline rank, None on the others."""
        is_first, is_last = self.stages[0].is_first, self.stages[-1].is_last
        losses: list[Tensor] = []
        arguments: dict[str, Any] = {"target": targets, "losses": losses} if is_last else {}
        if "return_outputs" in inspect.signature(self._schedule.step).parameters:  # they are not used
            arguments["return_outputs"] = False
        if document_lengths is not None:  # every stage takes those of its micro-batch
            arguments["document_lengths"] = document_lengths
        self._schedule.step(*([inputs] if is_first else []), **arguments)
        return torch.stack(losses).mean().detach() if is_last else None

    def _build_loss(self, stage: Stage) -> Callable[[Tensor, Tensor], Tensor]:
        """Return a function from the last stage's output and the targets to the loss."""
        mesh = self._groups.tp_mesh

        def loss_function(hidden: Tensor, targets: Tensor) -> Tensor:
            weight = stage.lm_head_weight
            if mesh is None:
                return next_token_loss(hidden.flatten(0, 1), weight, targets.flatten(), LOSS_CHUNK_TOKENS)
            assert isinstance(weight, DTensor)
            full = DTensor.from_local(hidden, mesh, [Shard(1)], run_check=False).redistribute(mesh, [Replicate()])
            hidden = full.to_local(grad_placements=[Partial()])
            return vocab_parallel_loss(hidden.flatten(0, 1), weight.to_local(), targets.flatten(), mesh.get_group())

        return loss_function
