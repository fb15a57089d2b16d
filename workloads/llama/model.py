"""A Llama decoder in plain PyTorch: what every workload here that trains one trains."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from workloads.llama.shapes import LlamaShape

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q[batch, heads, sequence, head_size] over the keys and values at and before each; these may have fewer heads."""
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class Block(nn.Module):
    """One layer: x + attention(norm(x)), then x + mlp(norm(x)). x is [batch, sequence, width].

    Layers that read the same input are one matrix, as `LlamaShape.linear` has them. It may have a part of the heads and
    of the MLP's width, its inputs and outputs whole: then it computes a part of what is to be added to x.
    """

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.shape = shape
        self.attention_norm = nn.RMSNorm(shape.hidden_size, eps=shape.norm_eps)
        self.qkv = nn.Linear(*shape.linear("qkv"), bias=shape.qkv_bias)
        self.output = nn.Linear(*shape.linear("output"), bias=False)
        self.mlp_norm = nn.RMSNorm(shape.hidden_size, eps=shape.norm_eps)
        self.gate_up = nn.Linear(*shape.linear("gate_up"), bias=False)
        self.down = nn.Linear(*shape.linear("down"), bias=False)
        self.attention: Attention = causal_attention

    def forward(self, x: Tensor, rope: Tensor) -> Tensor:
        x = x + self.output(self._attend(self.qkv(self.attention_norm(x)), rope))
        return x + self.down(self._widened(self.mlp_norm(x)))

    def _widened(self, x: Tensor) -> Tensor:
        return swiglu(*self.gate_up(x).chunk(2, dim=-1))

    def _attend(self, qkv: Tensor, rope: Tensor) -> Tensor:
        shape, (batch, length, _) = self.shape, qkv.shape
        heads = qkv.view(batch, length, -1, shape.head_size).transpose(1, 2)
        kv_heads = heads.shape[1] * shape.kv_heads // (shape.heads + 2 * shape.kv_heads)
        q, k, v = heads.split([heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)
        attn_out = self.attention(apply_rotary_emb(q, rope), apply_rotary_emb(k, rope), v)
        return attn_out.transpose(1, 2).reshape(batch, length, -1)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return functional.silu(gate) * up


def rope_table(shape: LlamaShape, length: int, device: torch.device) -> Tensor:
    """cos and sin of every position and pair of features, [2, length, head_size / 2], fp32 (Su et al. 2021)."""
    exponents = torch.arange(0, shape.head_size, 2, device=device, dtype=torch.float32) / shape.head_size
    rates = shape.rope_theta**-exponents
    if scaling := shape.rope_scaling:
        # Rotations that do not come round within the first context are slowed, those of a quarter of it are not.
        turns = scaling["original_max_position_embeddings"] * rates / (2 * math.pi)
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        rates = rates * (kept + (1 - kept) / scaling["factor"])
    angles = torch.outer(torch.arange(length, device=device, dtype=torch.float32), rates)
    return torch.stack([angles.cos(), angles.sin()])


def apply_rotary_emb(x: Tensor, rope: Tensor) -> Tensor:
    """x[batch, heads, sequence, head_size] turned by its position; the first half is paired with the second."""
    cos, sin = rope.to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


@contextmanager
def fastest_attention(device: torch.device) -> Iterator[None]:
    """cuDNN's attention before FlashAttention: on an H200 620 TFLOP/s forward against 320. Compiled code keeps it."""
    if device.type == "cpu":
        yield
        return
    order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel(order, set_priority=True):
        yield


class Llama(nn.Module):
    """Tokens [batch, sequence] to the mean next-token loss, with no logits of more than `chunk` tokens at a time."""

    def __init__(self, shape: LlamaShape, *, layers: int | None = None, chunk: int = 4096) -> None:
        super().__init__()
        self.shape, self.chunk = shape, chunk
        self.embedding = nn.Embedding(shape.vocabulary, shape.hidden_size)
        self.blocks = nn.ModuleList([Block(shape) for _ in range(layers or shape.layers)])
        self.norm = nn.RMSNorm(shape.hidden_size, eps=shape.norm_eps)
        self.lm_head = nn.Linear(*shape.linear("lm_head"), bias=False)
        if shape.tied:
            self.lm_head.weight = self.embedding.weight

    def initialize(self, generator: torch.Generator) -> None:
        """Random weights: normal with a deviation of 0.02, norms of one."""
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02, generator=generator)
            else:
                nn.init.zeros_(parameter)
        for module in self.modules():
            if isinstance(module, nn.RMSNorm):
                nn.init.ones_(module.weight)

    def forward(self, tokens: Tensor, targets: Tensor, rope: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, rope)
        return next_token_loss(self.norm(x).flatten(0, 1), self.lm_head.weight, targets.flatten(), self.chunk)


def next_token_loss(hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int) -> Tensor:
    """Mean cross entropy of hidden[tokens, width] @ weight[vocabulary, width]ᵀ against targets[tokens]."""
    return _ChunkedLoss.apply(hidden, weight, targets, chunk)


def loss_and_gradients(
    hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int, d_weight: Tensor, share: float = 1.0
) -> tuple[Tensor, Tensor]:
    """`next_token_loss` times `share` and its gradient of hidden; that of weight is added to `d_weight`.

    Chunk by chunk, so that nothing of a chunk has to be kept.
    """
    loss = torch.zeros((), device=hidden.device, dtype=torch.float32)
    d_hidden = torch.empty_like(hidden)
    scale = torch.full((), share / len(targets), device=hidden.device)  # as a number it would be compiled in
    for h, t, d_h in zip(hidden.split(chunk), targets.split(chunk), d_hidden.split(chunk), strict=True):
        chunk_loss, d_logits = _loss_and_gradient(h @ weight.t(), t, scale)
        loss += chunk_loss
        torch.mm(d_logits, weight, out=d_h)
        d_weight.addmm_(d_logits.t(), h)
        del d_logits  # before the next are made
    return loss, d_hidden


class _ChunkedLoss(torch.autograd.Function):
    """The gradients are taken in the forward pass."""

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int) -> Tensor:  # type: ignore[no-untyped-def]
        d_weight = torch.zeros_like(weight)
        loss, d_hidden = loss_and_gradients(hidden, weight, targets, chunk, d_weight)
        ctx.save_for_backward(d_hidden, d_weight)
        return loss

    @staticmethod
    def backward(ctx, d_loss: Tensor):  # type: ignore[no-untyped-def]
        d_hidden, d_weight = ctx.saved_tensors
        return d_hidden * d_loss, d_weight * d_loss, None, None  # kept: a zero-bubble pipeline asks twice


def _plain_loss_and_gradient(logits: Tensor, targets: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """The summed loss of a chunk times `scale`, and its gradient with respect to the logits in their own type."""
    log_sum = torch.logsumexp(logits.float(), dim=-1, keepdim=True)
    probabilities = torch.exp(logits.float() - log_sum)
    one_hot = torch.arange(logits.shape[-1], device=logits.device)[None, :] == targets[:, None]
    loss = (log_sum - logits.gather(1, targets[:, None]).float()).sum() * scale
    return loss, ((probabilities - one_hot.float()) * scale).to(logits.dtype)


_compiled_loss_and_gradient = torch.compile(_plain_loss_and_gradient, dynamic=False)


def _loss_and_gradient(logits: Tensor, targets: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    if logits.device.type == "cpu":
        return _plain_loss_and_gradient(logits, targets, scale)
    return _compiled_loss_and_gradient(logits, targets, scale)
