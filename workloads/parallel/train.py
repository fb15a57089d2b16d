"""The training of a model that a layout divides among ranks: batches, loss, schedules and the trainer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from workloads.estimator.memory import LOSS_CHUNK_TOKENS
from workloads.layouts.layout import Layout, Schedule
from workloads.llama.model import ChunkedLoss
from workloads.models.flops import document_lengths
from workloads.parallel.apply import Groups, precompute_fp8_scales, set_gradient_sync
from workloads.parallel.context import local_positions
from workloads.parallel.stage import Stage


@dataclass(frozen=True)
class Batch:
    """The sequences of a step."""

    tokens: Tensor  # [sequences, length + 1] int64: inputs and, one token later, their targets
    # The lengths of each sequence's documents, [sequences, documents] int64; None if a sequence is one document.
    document_lengths: Tensor | None = None

    def map(self, function: Callable[[Tensor], Tensor]) -> Batch:
        lengths = self.document_lengths
        return Batch(function(self.tokens), None if lengths is None else function(lengths))


@dataclass(frozen=True)
class TokenSource:
    """Draws sequences of `length` inputs over the whole vocabulary, in documents of `document_tokens` on average.

    The probability of an id is proportional to 1 / (id + 1), as for words (Zipf's law) and roughly for a tokenizer's
    ids. A model learns this within a few steps: its loss falls from ln(vocabulary), the loss for uniform tokens.
    """

    vocabulary: int
    length: int
    seed: int
    document_tokens: int = 0

    def draw(self, step: int, sequences: Iterable[int]) -> Batch:
        """Return the sequences in a step's global batch. Each has its own generator: a rank draws what it needs."""
        tokens, lengths = [], []
        for sequence in sequences:
            random = np.random.default_rng([self.seed, step, sequence])
            # The logarithm is uniform, so id n has probability ln((n + 2) / (n + 1)) / ln(vocabulary + 1).
            drawn = np.exp(random.random(self.length + 1) * np.log(self.vocabulary + 1)).astype(np.int64) - 1
            tokens.append(drawn)
            lengths.append(random.permutation(document_lengths(self.length, self.document_tokens)))
        packed = torch.from_numpy(np.stack(lengths)) if self.document_tokens else None
        return Batch(torch.from_numpy(np.stack(tokens)), packed)


def local_sequences(layout: Layout, groups: Groups) -> range:
    """Return the indices of the global batch's sequences that this rank trains on."""
    dp_rank = groups.mesh["dp_shard_cp"].get_local_rank() // layout.cp
    dp_rank += groups.mesh["dp_replicate"].get_local_rank() * layout.dp_shard
    count = layout.global_batch // layout.dp
    return range(dp_rank * count, (dp_rank + 1) * count)


MAX_NORM = 1.0  # torchtitan's training.max_norm and Megatron's --clip-grad


def clip_gradients(parameters: Sequence[nn.Parameter], divided: Sequence[nn.Parameter], groups: Groups) -> Tensor:
    """Scale the gradients of this rank's stages to a global norm of at most MAX_NORM. Returns the original norm.

    PyTorch's norm of distributed tensors covers only the ranks that share a stage. This function combines the norms of
    stages and of experts `divided` among ranks, as clip_grad_norm_ does in torchtitan/distributed/utils.py.

    This is a collective operation that all ranks must call.
    """
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
    square = (norm.full_tensor() if isinstance(norm, DTensor) else norm).square()
    if groups.ep_group is not None:
        of_experts = torch.nn.utils.get_total_norm([weight.grad for weight in divided if weight.grad is not None])
        of_experts = of_experts.to(square.device).square()
        dist.all_reduce(of_experts, group=groups.ep_group)
        square = square + of_experts
    if groups.mesh["pp"].size() > 1:
        dist.all_reduce(square, group=groups.mesh["pp"].get_group())
    norm = square.sqrt()
    for scaled in (parameters, divided):
        torch.nn.utils.clip_grads_with_norm_(scaled, MAX_NORM, norm)
    return norm


class VocabParallelLoss(ChunkedLoss):
    """`share` of the mean next-token loss, the same on all ranks, in chunks so that the full logits never exist.

    hidden: [tokens, hidden_size], the same on all ranks; its gradient is this rank's part of a sum
    weight: [rows, hidden_size], this rank's rows of the head

    Computes the gradients in the forward pass, as `workloads.llama.model.loss_and_gradients` does.
    """

    @staticmethod
    def forward(  # type: ignore[no-untyped-def, override]
        ctx, hidden: Tensor, weight: Tensor, targets: Tensor, group: dist.ProcessGroup, share: float
    ) -> Tensor:
        ranks, first_row = dist.get_world_size(group), dist.get_rank(group) * len(weight)
        loss = torch.zeros((), device=hidden.device, dtype=torch.float32)
        d_hidden, d_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        chunks = (tensor.split(LOSS_CHUNK_TOKENS) for tensor in (hidden, targets, d_hidden))
        for h, t, d_h in zip(*chunks, strict=True):
            logits = (h @ weight.t()).float()
            log_sums = [torch.empty(len(h), device=h.device) for _ in range(ranks)]
            dist.all_gather(log_sums, torch.logsumexp(logits, dim=-1), group=group)
            log_sum = torch.logsumexp(torch.stack(log_sums), dim=0)
            is_local = (t >= first_row) & (t < first_row + len(weight))
            row = (t - first_row).clamp(0, len(weight) - 1)[:, None]
            target_logits = torch.where(is_local, logits.gather(1, row)[:, 0], 0.0)
            dist.all_reduce(target_logits, group=group)
            loss += (log_sum - target_logits).sum() * (share / len(targets))
            d_logits = torch.exp(logits - log_sum[:, None])
            d_logits.scatter_add_(1, row, -is_local.float()[:, None])
            d_logits = (d_logits * (share / len(targets))).to(h.dtype)
            torch.mm(d_logits, weight, out=d_h)
            d_weight.addmm_(d_logits.t(), h)
        ctx.save_for_backward(d_hidden, d_weight)
        return loss


SCHEDULES: dict[Schedule, Any] = {
    "1f1b": pipelining.Schedule1F1B,
    "interleaved": pipelining.ScheduleInterleaved1F1B,
    "zero_bubble": pipelining.ScheduleInterleavedZeroBubble,
    "zbv": pipelining.ScheduleZBVZeroBubble,
    "dualpipev": pipelining.ScheduleDualPipeV,
}
NAMES = {schedule: name for name, schedule in SCHEDULES.items()}


Passes = Callable[..., Tensor]  # maps a step's tensors to its loss; adds to the gradients of parameters


class GraphedPasses:
    """A step's passes as one CUDA graph, which the host launches once. Small models would wait for separate launches.

    Records the passes on the first call and replays them on every call, on new tensors of the same sizes.

    The optimizer's step is not recorded. `torch.cuda.graph` requires warm-up runs on another stream before the
    recording; they also compile the kernels.
    """

    RUNS_BEFORE = 2

    def __init__(self, passes: Passes, parameters: Sequence[nn.Parameter]) -> None:
        self._passes, self._parameters = passes, parameters
        self.graph: torch.cuda.CUDAGraph | None = None
        self._inputs: tuple[Tensor | None, ...] = ()
        self._gradients: list[Tensor | None] = []
        self._loss = torch.empty(0)

    def __call__(self, *inputs: Tensor | None) -> Tensor:
        """Return the loss and set the gradients, which the next call overwrites."""
        if self.graph is None:
            self.graph = self._record(inputs)
        for recorded, tensor in zip(self._inputs, inputs, strict=True):
            if recorded is not None and tensor is not None:
                recorded.copy_(tensor)
        self.graph.replay()
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient
        return self._loss

    def _record(self, inputs: tuple[Tensor | None, ...]) -> torch.cuda.CUDAGraph:
        self._inputs = tuple(None if tensor is None else tensor.clone() for tensor in inputs)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(self.RUNS_BEFORE):
                self._passes(*self._inputs)
                # The gradients are dropped so that the recorded passes allocate them in the graph's own memory.
                for parameter in self._parameters:
                    parameter.grad = None
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._loss = self._passes(*self._inputs)
        self._gradients = [parameter.grad for parameter in self._parameters]
        return graph


def _forget_first_pass(stage: Stage) -> None:
    """Make a pipeline's stage forget, before its second pass, the loads of its first pass, forward and backward.

    PyTorch finds the sizes of the stage's outputs in that pass. Its inputs are uninitialized memory, which would move
    the biases of experts.
    """
    passes = count()

    def forget(*_: object) -> None:
        if next(passes):
            for experts in stage.experts.values():
                experts.load.zero_()
            handle.remove()

    handle = stage.register_forward_pre_hook(forget)


class Trainer:
    """Runs the forward and backward passes of this rank's stages, and updates their parameters with AdamW."""

    def __init__(
        self,
        stages: list[Stage],
        layout: Layout,
        groups: Groups,
        device: torch.device,
        learning_rate: float,
        *,
        clips: bool = True,
        keeps_weights: bool = False,
    ) -> None:
        self.stages, self.layout, self.groups, self._device = stages, layout, groups, device
        self._clips, self._keeps_weights = clips, keeps_weights
        self.gradient_norm: Tensor | None = None  # of the last step, over all ranks; None without clipping
        self._divided = [weight for stage in stages for weight in stage.divided_experts]
        divided = set(self._divided)
        parameters = [parameter for stage in stages for parameter in stage.parameters()]
        self._parameters = [parameter for parameter in parameters if parameter not in divided]
        # Tensors sharded by FSDP and other tensors cannot be updated in one operation.
        parts: list[Any] = [{"params": part} for part in (self._parameters, self._divided) if part]
        self._optimizer = torch.optim.AdamW(
            parts, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.1, fused=device.type == "cuda"
        )
        self._schedule: Any = None
        if layout.pp > 1:
            for stage in stages:
                _forget_first_pass(stage)
            mesh = groups.mesh["pp"]
            pipeline_stages = [
                pipelining.PipelineStage(stage, index, layout.stages, device, group=mesh.get_group())
                for stage, index in zip(stages, layout.list_stages(mesh.get_local_rank()), strict=True)
            ]
            one_or_more = pipeline_stages[0] if layout.schedule == "1f1b" else pipeline_stages
            loss_function = self._build_loss(stages[-1], share=1.0)  # PyTorch divides a pipeline's gradients
            self._schedule = SCHEDULES[layout.schedule](one_or_more, layout.microbatches, loss_fn=loss_function)
        self._run_passes: Any = self._run_pipeline if self._schedule else self._run_microbatches
        if layout.cuda_graph:
            self._run_passes = GraphedPasses(self._run_microbatches, self._parameters)

    @property
    def executed(self) -> dict[str, str | bool]:
        """The parameters `schedule` and `cuda_graph` as executed."""
        has_graph = isinstance(self._run_passes, GraphedPasses) and self._run_passes.graph is not None
        return {"schedule": NAMES[type(self._schedule)] if self._schedule else "1f1b", "cuda_graph": has_graph}

    def step(self, batch: Batch) -> Tensor:
        """Train one step on this rank's sequences. Returns the mean loss over all ranks."""
        loss = self.compute_gradients(batch)
        self.update()
        return loss

    def update(self) -> None:
        if self._clips:
            self.gradient_norm = clip_gradients(self._parameters, self._divided, self.groups)
        self._optimizer.step()
        self._optimizer.zero_grad()
        for experts in (experts for stage in self.stages for experts in stage.experts.values()):
            if experts.routing.bias_rate:  # biases follow the loads of all ranks that share these stages
                for name in ("dp_replicate", "dp_shard_cp", "tp"):
                    dist.all_reduce(experts.load, group=self.groups.mesh[name].get_group())
                experts.balance()
        for stage in self.stages:
            precompute_fp8_scales(stage)

    def state_dtypes(self) -> set[torch.dtype]:
        """Return the data types of all parameters and of both optimizer states per parameter, after a step."""
        states = [state[name] for state in self._optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
        return {tensor.dtype for tensor in (*self._parameters, *self._divided, *states)}

    def compute_gradients(self, batch: Batch) -> Tensor:
        """Run the forward and backward passes of this rank's sequences. Returns the mean loss of all ranks."""
        batch, layout = batch.map(lambda tensor: tensor.to(self._device, non_blocking=True)), self.layout
        inputs, targets = batch.tokens[:, :-1], batch.tokens[:, 1:]
        if self.groups.cp_group is not None:  # this rank's part of each sequence
            positions = local_positions(inputs.shape[1], layout.cp, dist.get_rank(self.groups.cp_group))
            positions = positions.to(self._device)
            inputs, targets = inputs[:, positions], targets[:, positions]
        loss = self._run_passes(inputs.contiguous(), targets.contiguous(), batch.document_lengths)
        for weight in self._divided:  # averaged over all ranks with other sequences, as FSDP does for other weights
            assert weight.grad is not None
            if layout.dp * layout.cp * layout.tp > layout.ep:
                dist.all_reduce(weight.grad, group=self.groups.expert_group)
            weight.grad /= layout.dp * layout.cp
        if loss is None:  # only the last pipeline ranks have a loss
            sum_and_count = torch.tensor([0.0, 0.0], device=self._device)
        else:
            sum_and_count = torch.stack([loss, loss.new_ones(())])
        dist.all_reduce(sum_and_count)
        return sum_and_count[0] / sum_and_count[1]

    def _run_microbatches(self, inputs: Tensor, targets: Tensor, document_lengths: Tensor | None) -> Tensor:
        """Run the micro-batches one after the other, without a pipeline. Returns their mean loss."""
        for stage in self.stages:
            stage.forget_casts()
        count, loss = self.layout.microbatches, torch.zeros((), device=self._device)
        loss_function = self._build_loss(self.stages[0], share=1 / count)
        lengths = [None] * count if document_lengths is None else document_lengths.chunk(count)
        for n, (x, t, d) in enumerate(zip(inputs.chunk(count), targets.chunk(count), lengths, strict=True)):
            is_last = n == count - 1
            set_gradient_sync(self.stages, self.layout, is_last_microbatch=is_last, keeps_weights=self._keeps_weights)
            microbatch_loss = loss_function(self.stages[0](x, d), t)
            microbatch_loss.backward()
            loss += microbatch_loss.detach()
        return loss

    def _run_pipeline(self, inputs: Tensor, targets: Tensor, document_lengths: Tensor | None) -> Tensor | None:
        """Run a step through the pipeline. Returns the mean loss on the last pipeline rank, None on the others."""
        for stage in self.stages:
            stage.forget_casts()
        is_first, is_last = self.stages[0].embedding is not None, self.stages[-1].head is not None
        losses: list[Tensor] = []
        arguments: dict[str, Any] = {"target": targets, "losses": losses} if is_last else {}
        if "return_outputs" in inspect.signature(self._schedule.step).parameters:  # outputs are not used
            arguments["return_outputs"] = False
        if document_lengths is not None:  # every stage takes the lengths of its micro-batch
            arguments["document_lengths"] = document_lengths
        self._schedule.step(*([inputs] if is_first else []), **arguments)
        return torch.stack(losses).mean().detach() if is_last else None

    def _build_loss(self, stage: Stage, share: float) -> Callable[[Tensor, Tensor], Tensor]:
        mesh = self.groups.tp_mesh

        def loss_function(hidden: Tensor, targets: Tensor) -> Tensor:
            weight = stage.lm_head_weight
            if mesh is None:
                return ChunkedLoss.apply(hidden.flatten(0, 1), weight, targets.flatten(), LOSS_CHUNK_TOKENS, share)
            assert isinstance(weight, DTensor)
            full = DTensor.from_local(hidden, mesh, [Shard(1)], run_check=False).redistribute(mesh, [Replicate()])
            hidden = full.to_local(grad_placements=[Partial()])
            rows = weight.to_local()
            inputs = hidden.flatten(0, 1), rows, targets.flatten()
            loss: Tensor = VocabParallelLoss.apply(*inputs, mesh.get_group(), share)
            return loss

        return loss_function
