"""Steps of a model that is laid out over ranks."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import pipelining
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from workloads.llama.model import next_token_loss
from workloads.parallel.apply import Groups, sync_gradients
from workloads.parallel.context import positions
from workloads.parallel.layout import LOSS_TOKENS, Layout
from workloads.parallel.loss import sharded_loss
from workloads.parallel.stage import Stage

SCHEDULES: dict[str, Any] = {
    "1f1b": pipelining.Schedule1F1B,
    "interleaved": pipelining.ScheduleInterleaved1F1B,
    "zero_bubble": pipelining.ScheduleInterleavedZeroBubble,
}


class Trainer:
    """Forward and backward passes of this rank's stages, and AdamW over what it keeps of them."""

    def __init__(
        self, stages: list[Stage], layout: Layout, groups: Groups, device: torch.device, learning_rate: float
    ) -> None:
        self.stages, self.layout, self._groups, self._device = stages, layout, groups, device
        parameters = [p for stage in stages for p in stage.parameters()]
        self._optimizer = torch.optim.AdamW(
            parameters, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.1, fused=device.type == "cuda"
        )
        self._schedule = self._pipeline() if layout.pipeline > 1 else None

    def step(self, tokens: Tensor) -> Tensor:
        """One step on tokens[global_batch, length + 1], each rank taking its own; the mean loss."""
        loss = self.gradients(tokens)
        self.update()
        return loss

    def update(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()

    def gradients(self, tokens: Tensor) -> Tensor:
        """The forward and backward passes of a step: gradients lie with the parameters, the loss is all ranks' mean."""
        inputs, targets = self._own(tokens)
        mean = self._through_pipeline(inputs, targets) if self._schedule else self._alone(inputs, targets)
        # Only the pipeline's last ranks know a loss.
        both = torch.tensor([0.0, 0.0], device=self._device) if mean is None else torch.stack([mean, mean.new_ones(())])
        dist.all_reduce(both)
        return both[0] / both[1]

    def _own(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and targets [sequences, length] of this rank."""
        layout, mesh = self.layout, self._groups.mesh
        place = mesh["shard"].get_local_rank() // layout.context
        place += mesh["replicate"].get_local_rank() * layout.shard
        mine = tokens.chunk(layout.data)[place].to(self._device)
        inputs, targets = mine[:, :-1], mine[:, 1:]
        if self._groups.context is not None:
            own = positions(inputs.shape[1], layout.context, dist.get_rank(self._groups.context)).to(self._device)
            inputs, targets = inputs[:, own], targets[:, own]
        return inputs.contiguous(), targets.contiguous()

    def _alone(self, inputs: Tensor, targets: Tensor) -> Tensor:
        count, loss = self.layout.microbatches, torch.zeros((), device=self._device)
        for n, (x, t) in enumerate(zip(inputs.chunk(count), targets.chunk(count), strict=True)):
            sync_gradients(self.stages, last=n == count - 1, reshard=self.layout.reshard)
            part = self._loss(self.stages[0])(self.stages[0](x), t) / count
            part.backward()
            loss += part.detach()
        return loss

    def _through_pipeline(self, inputs: Tensor, targets: Tensor) -> Tensor | None:
        assert self._schedule is not None
        first = self.stages[0].embedding is not None
        last = self.stages[-1].norm is not None
        losses: list[Tensor] = []
        wanted: dict[str, Any] = {"target": targets, "losses": losses} if last else {}
        if "return_outputs" in inspect.signature(self._schedule.step).parameters:  # which nobody wants
            wanted["return_outputs"] = False
        self._schedule.step(*([inputs] if first else []), **wanted)
        return torch.stack(losses).mean().detach() if last else None

    def _pipeline(self) -> Any:
        layout, mesh = self.layout, self._groups.mesh["pipeline"]
        numbers = range(mesh.get_local_rank(), layout.total_stages, layout.pipeline)
        stages = [
            pipelining.PipelineStage(stage, n, layout.total_stages, self._device, group=mesh.get_group())
            for stage, n in zip(self.stages, numbers, strict=True)
        ]
        loss = self._loss(self.stages[-1])
        several = stages if layout.schedule != "1f1b" else stages[0]
        return SCHEDULES[layout.schedule](several, layout.microbatches, loss_fn=loss)

    def _loss(self, stage: Stage) -> Callable[[Tensor, Tensor], Tensor]:
        """What the last stage's output and the targets make."""
        mesh = self._groups.tensor

        def loss(hidden: Tensor, targets: Tensor) -> Tensor:
            weight = stage.lm_head_weight
            if mesh is None:
                return next_token_loss(hidden.flatten(0, 1), weight, targets.flatten(), LOSS_TOKENS)
            assert isinstance(weight, DTensor)
            whole = DTensor.from_local(hidden, mesh, [Shard(1)], run_check=False).redistribute(mesh, [Replicate()])
            hidden = whole.to_local(grad_placements=[Partial()])
            return sharded_loss(hidden.flatten(0, 1), weight.to_local(), targets.flatten(), mesh.get_group())

        return loss
