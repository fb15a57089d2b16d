"""A pipeline stage of a Llama, or the whole model, which layouts divide among ranks."""

import math
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from workloads.layouts.layout import Checkpointing
from workloads.llama.block import BlockMath, NamedTensors
from workloads.llama.experts import Experts
from workloads.llama.fp8_block import COLUMNS, ROWS, SCALE
from workloads.llama.model import Block
from workloads.llama.pytorch_attention import document_offsets, find_varlen_ops
from workloads.llama.sink_attention import ATTEND_WITH_SINKS
from workloads.models.model import Model
from workloads.parallel.context import ATTEND_OVER_RANKS

# Selective checkpointing saves the results of attention and of every GEMM except the widest, which is recomputed.
# Nothing inside experts is saved: neither grouped GEMMs nor the sums with biases.
SAVED_OPS = {
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    ATTEND_OVER_RANKS,
    ATTEND_WITH_SINKS,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,  # of tensor parallelism: avoids communicating again
}
# The index of the weight in the arguments of a GEMM.
WEIGHT_ARGUMENTS = {torch.ops.aten.mm.default: 1, torch.ops.aten.addmm.default: 2}


def _save_all_but(widest: tuple[tuple[int, ...], ...], gate: tuple[int, ...]) -> Any:
    """Return contexts that save SAVED_OPS and matrix products, except those with weights of the sorted sizes `widest`.

    Of the products with a weight of the size `gate`, only the first is saved.
    """
    saved_ops = SAVED_OPS | find_varlen_ops()
    passed: Counter[bool] = Counter()  # products with that size, in the forward pass and in its recomputation

    def policy(context: Any, function: Any, *args: Any, **__: object) -> CheckpointPolicy:
        is_saved = function in saved_ops
        if at := WEIGHT_ARGUMENTS.get(function):
            size = tuple(args[at].shape)
            is_saved = tuple(sorted(size)) not in widest and (at == 1 or args[0].dim() == 1)
            if size == gate:
                passed[context.is_recompute] += 1
                is_saved = passed[context.is_recompute] == 1
        return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


class CheckpointedBlock(nn.Module):
    """A block that recomputes some or all of its activations in the backward pass."""

    def __init__(self, block: Block, checkpointing: Checkpointing) -> None:
        super().__init__()
        self.block, self.checkpointing = block, checkpointing
        # In a block with experts, these are the weights of the shared expert.
        weights: list[Tensor] = [w for name, w in block.named_parameters() if name.endswith("gate_up.weight")]
        block.splits_gate_up = checkpointing == "selective_up"
        gate = (block.shape.hidden_size, block.shape.intermediate_size) if block.splits_gate_up else ()
        weights += [weight.to_local() for weight in weights if isinstance(weight, DTensor)]
        widest = tuple(sorted({tuple(sorted(weight.shape)) for weight in weights}))
        # PyTorch's cache of compiled graphs pickles the function and identifies it by this hash. Without pickling and
        # hash, every trial would compile the block again.
        self._contexts = partial(_save_all_but, widest, gate)
        self._contexts.cache_hash = f"{sorted(map(str, SAVED_OPS))} {widest} {gate} biases"  # type: ignore[attr-defined]

    def forward(self, *inputs: Tensor) -> Tensor:
        if self.checkpointing == "full":
            return checkpoint(self.block, *inputs, use_reentrant=False)
        return checkpoint(self.block, *inputs, use_reentrant=False, context_fn=self._contexts)


class ManualBackwardBlock(Block):
    """A block with a manual backward pass (`workloads.llama.block`), for whole weights and whole sequences.

    This is faster than the backward pass that PyTorch generates for a compiled block.
    """

    # The activations that are saved for the backward pass; the rest are recomputed.
    SAVED_ACTIVATIONS: ClassVar[dict[Checkpointing, tuple[str, ...]]] = {
        "none": ("q", "kv", "attn_out", "lse", "residual", "gate", "up"),
        "selective_up": ("q", "kv", "attn_out", "lse", "residual", "gate"),
        "selective": ("q", "kv", "attn_out", "lse", "residual"),
        "full": (),
    }

    def __init__(self, block_math: BlockMath, checkpointing: Checkpointing) -> None:
        super().__init__(block_math.shape)
        self.block_math, self.checkpointing = block_math, checkpointing
        self.kept: NamedTensors = {}  # from a step's first cast of the weights: their scales, or all fp8 operands
        # Frees the gathered matrices; fp8 operands replace them until the step ends. None to cast in each pass.
        self.free_matrices: Callable[[], None] | None = None

    def forward(self, x: Tensor, rope: Tensor, *document_offsets: Tensor) -> Tensor:
        assert not document_offsets
        out: Tensor = _ManualBackward.apply(self, rope, x, *self.parameters())
        return out

    def cast(self, weights: NamedTensors, *, forward: bool, backward: bool) -> NamedTensors:
        """Return the weights plus the passes' operands. A step keeps their scales, or all if it frees the matrices."""
        if self.free_matrices is not None and any(name.endswith((ROWS, COLUMNS)) for name in self.kept):
            self.free_matrices()  # a pipeline gathers them again after its first pass
            return weights | self.kept
        keeps = self.free_matrices is not None
        operands = self.block_math.cast_weights(
            weights | self.kept, forward=forward or keeps, backward=backward or keeps
        )
        kept = operands.keys() - weights.keys() if keeps else {f"{name}{SCALE}" for name in weights} & operands.keys()
        self.kept = {name: operands[name] for name in kept}
        if self.free_matrices is not None:
            self.free_matrices()
        return operands


class _ManualBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, block: ManualBackwardBlock, rope: Tensor, x: Tensor, *weights: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.block, ctx.saved_names = block, block.SAVED_ACTIVATIONS[block.checkpointing]
        ctx.weight_names = [name for name, _ in block.named_parameters()]
        operands = block.cast(dict(zip(ctx.weight_names, weights, strict=True)), forward=True, backward=False)
        out, activations = block.block_math.forward(operands, x.flatten(0, 1), rope, None)
        ctx.save_for_backward(rope, x, *(activations[name] for name in ctx.saved_names), *weights)
        # This must not be a view for autograd: schedules that split the backward pass detach a stage's output in place.
        return torch.ops.aten._unsafe_view(out, x.shape)

    @staticmethod
    def backward(ctx, d_out: Tensor):  # type: ignore[no-untyped-def]
        rope, x, *saved = ctx.saved_tensors
        activations = dict(zip(ctx.saved_names, saved, strict=False)) | {"x": x.flatten(0, 1)}
        weights = dict(zip(ctx.weight_names, saved[len(ctx.saved_names) :], strict=True))
        gradients: dict[str, Tensor] = {}
        is_repeated = "up" not in activations  # some GEMMs are repeated
        operands = ctx.block.cast(weights, forward=is_repeated, backward=True)
        d_x = ctx.block.block_math.backward(operands, gradients, activations, rope, d_out.contiguous().flatten(0, 1))
        return None, None, d_x.view_as(x), *(gradients[name] for name in ctx.weight_names)


class Head(nn.Module):
    """The last norm and the output matrix in one module, which makes FSDP gather both before the norm."""

    def __init__(self, shape: Model) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(shape.hidden_size, eps=shape.norm_eps)
        # None if the embedding serves as the matrix.
        self.lm_head = None if shape.tied else nn.Linear(*shape.linear("lm_head"), bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalized hidden states. The loss reads the output matrix directly."""
        normed: Tensor = self.norm(x)
        return normed


class Stage(nn.Module):
    """Layers of a Llama. The first stage also has the embedding, and the last stage the last norm and the head.

    forward takes tokens [batch, length] in the first stage, and the previous stage's output [batch, length,
    hidden_size] in later stages. The last stage returns the normalized hidden states, from which the loss is computed
    with `lm_head_weight` and the targets. If sequences are packed with documents, every stage also takes document
    lengths, [batch, documents per sequence].
    """

    def __init__(self, shape: Model, layers: range, rope: Tensor, build_block: Callable[[int], Block]) -> None:
        super().__init__()
        self.shape, self.rope = shape, rope
        self.embedding = nn.Embedding(shape.vocabulary, shape.hidden_size) if layers.start == 0 else None
        self.blocks = nn.ModuleDict({str(layer): build_block(layer) for layer in layers})
        self.head = Head(shape) if layers.stop == shape.layers else None

    @property
    def first_block(self) -> Any:
        """The stage's first block, without its checkpointing wrapper."""
        block = next(iter(self.blocks.values()))
        return getattr(block, "block", block)

    @property
    def experts(self) -> dict[int, Experts]:
        """The experts of the stage's blocks, by block number; blocks without experts are left out."""
        blocks: dict[int, Any] = {int(name): getattr(block, "block", block) for name, block in self.blocks.items()}
        return {number: block.experts for number, block in blocks.items() if block.has_experts}

    @property
    def divided_experts(self) -> dict[nn.Parameter, Experts]:
        """The expert weights that are divided among ranks, each mapped to its experts."""
        return {weight: experts for experts in self.experts.values() for weight in experts.divided}

    def forget_casts(self) -> None:
        """Make the next passes cast each weight anew."""
        for block in self.blocks.values():
            getattr(block, "kept", {}).clear()

    @property
    def lm_head_weight(self) -> Tensor:  # of the last stage
        assert self.head is not None
        return (self.head.lm_head or self.embedding).weight  # type: ignore[union-attr]

    def forward(self, x: Tensor, document_lengths: Tensor | None = None) -> Tensor:
        offsets = () if document_lengths is None else (document_offsets(document_lengths),)
        if self.embedding is not None:
            x = self.embedding(x)
            if type(x) is not Tensor:  # an AsyncCollectiveTensor, which a compiled block does not accept
                x = x.clone()
        for block in self.blocks.values():
            x = block(x, self.rope, *offsets)
        return x if self.head is None else self.head(x)


def named_llama_parameters(stage: Stage) -> dict[str, nn.Parameter]:
    """Return the parameters by their names in the whole decoder, without the names of wrappers."""
    return {
        name.removeprefix("head.").replace("._orig_mod", "").replace(".block.", "."): parameter
        for name, parameter in stage.named_parameters()
    }


Initializer = Callable[[str, tuple[int, ...]], Tensor]


def build_initializer(seed: int, device: torch.device, *, is_tied: bool = False) -> Initializer:
    """Return a function that maps a parameter's name and size to its initial value, the same in every layout. Matrices
    are normally distributed with the deviation `initial_deviation`; norms are ones, biases and sinks zeros."""
    generator = torch.Generator(device)

    def initialize(name: str, size: tuple[int, ...]) -> Tensor:
        if len(size) == 1 or name.endswith("bias"):  # experts' biases form a matrix
            return torch.full(size, 0.0 if name.endswith(("bias", "sinks")) else 1.0, device=device)
        name_hash = sum(ord(letter) * 131**n for n, letter in enumerate(name)) % 2**32
        generator.manual_seed(name_hash ^ seed)
        return torch.empty(size, device=device).normal_(std=initial_deviation(name, size, is_tied), generator=generator)

    return initialize


def initial_deviation(name: str, size: tuple[int, ...], is_tied: bool) -> float:
    """Return the standard deviation of a matrix's initial values, the same as in torchtitan's llama3.

    For a block's output projections, the deviation decreases with the block's number, so the sum of all blocks stays
    bounded, and training is stable without learning rate warm-up. An embedding that is also the head uses the head's
    deviation. `size` is [outputs, inputs] for a matrix and [vocabulary, hidden size] for the embedding.
    """
    if name in ("embedding.weight", "lm_head.weight"):
        return size[1] ** -0.5 if name == "lm_head.weight" or is_tied else 1.0
    _, block, matrix = name.split(".", 2)
    is_last = matrix in ("output.weight", "down.weight", "experts.down", "experts.shared_down.weight")
    return 0.02 / math.sqrt(2 * (int(block) + 1)) if is_last else 0.02
