"""A pipeline stage of a Llama, or the whole of it: the model that every layout lays out."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from workloads.llama.block import BlockMath
from workloads.llama.model import Block
from workloads.llama.shapes import LlamaShape
from workloads.parallel.layout import Checkpointing

# What selective checkpointing keeps: what attention made, and every product but the widest, which is computed again.
KEPT = {
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
}
WEIGHTS = {torch.ops.aten.mm.default: 1, torch.ops.aten.addmm.default: 2}  # which argument of a product it is


class Kept(nn.Module):
    """A block whose activations are computed again in the backward pass, all of them or some."""

    def __init__(self, block: Block, checkpointing: Checkpointing) -> None:
        super().__init__()
        self.block, self.checkpointing = block, checkpointing
        weight = block.gate_up.weight
        local = weight.to_local() if isinstance(weight, DTensor) else weight
        widest = {tuple(sorted(weight.shape)), tuple(sorted(local.shape))}

        # No method: what is compiled takes a plain function for a constant.
        def policy(_: object, function: Any, *args: Any, **__: object) -> CheckpointPolicy:
            product = function in WEIGHTS and tuple(sorted(args[WEIGHTS[function]].shape)) not in widest
            return CheckpointPolicy.MUST_SAVE if product or function in KEPT else CheckpointPolicy.PREFER_RECOMPUTE

        self._contexts = partial(create_selective_checkpoint_contexts, policy)

    def forward(self, x: Tensor, rope: Tensor) -> Tensor:
        if self.checkpointing == "full":
            return checkpoint(self.block, x, rope, use_reentrant=False)
        return checkpoint(self.block, x, rope, use_reentrant=False, context_fn=self._contexts)


class WrittenBlock(Block):
    """A block whose backward pass is written out (`workloads.llama.block`): for whole weights and whole sequences, and
    faster than what PyTorch makes of a compiled block."""

    # What waits for the backward pass; the rest is computed again.
    KEPT: ClassVar[dict[Checkpointing, tuple[str, ...]]] = {
        "none": ("q", "kv", "attn_out", "lse", "residual", "gate", "up"),
        "selective": ("q", "kv", "attn_out", "lse", "residual"),
        "full": (),
    }

    def __init__(self, maths: BlockMath, checkpointing: Checkpointing) -> None:
        super().__init__(maths.shape)
        self.maths, self.checkpointing = maths, checkpointing

    def forward(self, x: Tensor, rope: Tensor) -> Tensor:
        names, weights = zip(*self.named_parameters(), strict=True)
        out: Tensor = _Written.apply(self.maths, self.KEPT[self.checkpointing], names, rope, x, *weights)
        return out


class _Written(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx, maths: BlockMath, kept: tuple[str, ...], names: tuple[str, ...], rope: Tensor, x: Tensor, *weights: Tensor
    ) -> Tensor:
        out, made = maths.forward(dict(zip(names, weights, strict=True)), x.flatten(0, 1), rope, None)
        ctx.maths, ctx.kept, ctx.names = maths, kept, names
        ctx.save_for_backward(rope, x, *(made[name] for name in kept), *weights)
        return out.view_as(x)

    @staticmethod
    def backward(ctx, d_out: Tensor):  # type: ignore[no-untyped-def]
        rope, x, *saved = ctx.saved_tensors
        made = dict(zip(ctx.kept, saved, strict=False)) | {"x": x.flatten(0, 1)}
        weights = dict(zip(ctx.names, saved[len(ctx.kept) :], strict=True))
        gradients: dict[str, Tensor] = {}
        d_x = ctx.maths.backward(weights, gradients, made, rope, d_out.contiguous().flatten(0, 1))
        return None, None, None, None, d_x.view_as(x), *(gradients[name] for name in ctx.names)


class Stage(nn.Module):
    """Layers of a Llama, with the embedding in front of the first and the last norm behind the last.

    forward takes tokens [batch, length] or what the stage before gives [batch, length, width], and gives that or, of
    the last stage, the normed result, which with `head` and the targets makes the loss.
    """

    def __init__(self, shape: LlamaShape, layers: range, rope: Tensor, block: Callable[[], Block]) -> None:
        super().__init__()
        self.shape, self.rope = shape, rope
        self.embedding = nn.Embedding(shape.vocabulary, shape.hidden_size) if layers.start == 0 else None
        self.blocks = nn.ModuleDict({str(n): block() for n in layers})
        last = layers.stop == shape.layers
        self.norm = nn.RMSNorm(shape.hidden_size, eps=shape.norm_eps) if last else None
        self.lm_head = nn.Linear(*shape.linear("lm_head"), bias=False) if last and not shape.tied else None

    @property
    def lm_head_weight(self) -> Tensor:
        """Of the last stage."""
        return (self.lm_head or self.embedding).weight  # type: ignore[union-attr]

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
            if type(x) is not Tensor:  # still on its way to all ranks: nothing that a compiled block takes
                x = x.clone()
        for block in self.blocks.values():
            x = block(x, self.rope)
        return self.norm(x) if self.norm is not None else x


def each_parameter(stage: Stage) -> dict[str, nn.Parameter]:
    """By the names that they have in `workloads.llama.model.Llama`, whatever wraps the blocks."""
    return {
        name.replace("._orig_mod", "").replace(".block.", "."): parameter
        for name, parameter in stage.named_parameters()
    }


Initial = Callable[[str, tuple[int, ...]], Tensor]


def random_weights(seed: int, device: torch.device) -> Initial:
    """The same weights of a name whatever the layout: normal with a deviation of 0.02, norms of one, biases of zero."""
    generator = torch.Generator(device)

    def weights(name: str, size: tuple[int, ...]) -> Tensor:
        if len(size) == 1:
            return torch.full(size, 0.0 if name.endswith("bias") else 1.0, device=device)
        own = sum(ord(letter) * 131**n for n, letter in enumerate(name)) % 2**32
        return torch.empty(size, device=device).normal_(std=0.02, generator=generator.manual_seed(own ^ seed))

    return weights
