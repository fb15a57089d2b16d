"""The parts of a Llama decoder in plain PyTorch. Every training workload trains them, whichever engine runs them."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from workloads.instruments.device import compiled_on_gpu
from workloads.llama.experts import Experts, local_part
from workloads.llama.pytorch_attention import causal_attention
from workloads.llama.sink_attention import attend_with_sinks
from workloads.models.model import Model

Attention = Callable[..., Tensor]


class Block(nn.Module):
    """One transformer block: x + attention(norm(x)), then x + mlp(norm(x)), with a dense MLP or experts.

    Layers that read the same input share one matrix, as in `Model.linear`. Under tensor parallelism, the block holds
    part of the heads and of the intermediate size, and `output` and `down` return partial sums. The layer number
    `layer` decides whether the block has experts and a window.

    `attention` maps (q, k, v) to the output [batch, heads, length, head_size]. If the block is called with
    `document_offsets` (`workloads.llama.pytorch_attention`), they are passed to `attention` as the fourth argument.
    """

    def __init__(self, shape: Model, layer: int = 0) -> None:
        super().__init__()
        self.shape, self.has_experts = shape, shape.has_experts(layer)
        self.window = 0 if shape.attends_to_all(layer) else shape.window
        self.attention_norm = nn.RMSNorm(shape.hidden_size, eps=shape.norm_eps)
        self.qkv = nn.Linear(*shape.linear("qkv"), bias=shape.qkv_bias)
        if shape.qk_norm:
            self.q_norm, self.k_norm = (nn.RMSNorm(size, eps=shape.norm_eps) for size in shape.qk_norm_sizes)
        if shape.gpt_oss:
            self.sinks = nn.Parameter(torch.empty(shape.heads))
        self.output = nn.Linear(*shape.linear("output"), bias=shape.gpt_oss)
        self.mlp_norm = nn.RMSNorm(shape.hidden_size, eps=shape.norm_eps)
        if self.has_experts:
            self.experts = Experts(shape)
        else:
            self.gate_up = nn.Linear(*shape.linear("gate_up"), bias=False)
            self.down = nn.Linear(*shape.linear("down"), bias=False)
        self.attention: Attention = causal_attention
        self.splits_gate_up = False  # into two GEMMs, of which selective_up saves one

    def forward(self, x: Tensor, rope: Tensor, *document_offsets: Tensor) -> Tensor:
        """Return the block's output for x[batch, length, hidden_size] and the `rope_table` of its positions."""
        x = x + self.output(self._attend(self.qkv(self.attention_norm(x)), rope, *document_offsets))
        normed = self.mlp_norm(x)
        if self.has_experts:
            return x + self.experts(normed)
        if self.splits_gate_up:
            gate, up = (functional.linear(normed, half) for half in self.gate_up.weight.chunk(2))
        else:
            gate, up = self.gate_up(normed).chunk(2, dim=-1)
        return x + self.down(swiglu(gate, up))

    def _attend(self, qkv: Tensor, rope: Tensor, *document_offsets: Tensor) -> Tensor:
        shape, (batch, length, _) = self.shape, qkv.shape
        heads = qkv.view(batch, length, -1, shape.head_size)
        kv_heads = heads.shape[2] * shape.kv_heads // (shape.heads + 2 * shape.kv_heads)
        q, k, v = heads.split([heads.shape[2] - 2 * kv_heads, kv_heads, kv_heads], dim=2)
        if shape.qk_norm:
            norms, is_whole = ((self.q_norm, q), (self.k_norm, k)), shape.qk_norm == "all"
            q, k = (norm(x.flatten(2) if is_whole else x).view(x.shape) for norm, x in norms)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        q, k = apply_rotary_emb(q, rope), apply_rotary_emb(k, rope)
        if shape.gpt_oss:
            attn_out, _ = attend_with_sinks(q, k, v, local_part(self.sinks), self.window)
        else:
            attn_out = self.attention(q, k, v, *document_offsets)
        return attn_out.transpose(1, 2).reshape(batch, length, -1)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up (Shazeer 2020)."""
    return functional.silu(gate) * up


def rope_table(shape: Model, length: int, device: torch.device) -> Tensor:
    """Return the rotary embedding's cos and sin, [2, length, rotated features / 2] in fp32 (Su et al. 2021)."""
    rotated = int(shape.head_size * shape.rotary_share)
    exponents = torch.arange(0, rotated, 2, device=device, dtype=torch.float32) / rotated
    frequencies, amplitude = shape.rope_theta**-exponents, 1.0
    if scaling := shape.rope_scaling:
        # A frequency with fewer than `low` rotations in the original context is divided by the factor, and one with
        # more than `high` is left unchanged. In between, Llama 3.1 interpolates over the rotations, and YaRN
        # (arXiv 2309.00071) over their logarithms. YaRN also scales the scores.
        rotations = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
        if shape.gpt_oss:
            rotations, amplitude = rotations.log(), 1 + 0.1 * math.log(scaling["factor"])
            low, high = math.log(scaling["beta_slow"]), math.log(scaling["beta_fast"])
        else:
            low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        unscaled = ((rotations - low) / (high - low)).clamp(0, 1)
        frequencies = frequencies * (unscaled + (1 - unscaled) / scaling["factor"])
    angles = torch.outer(torch.arange(length, device=device, dtype=torch.float32), frequencies)
    return torch.stack([angles.cos(), angles.sin()]) * amplitude


def apply_rotary_emb(x: Tensor, rope: Tensor) -> Tensor:
    """Return x[batch, heads, length, head_size] rotated by its positions, in x's data type.

    Feature i is paired with feature i + `half`, as in Hugging Face's checkpoints; `half` is half the number of rotated
    features. The remaining features are not rotated.
    """
    cos, sin = rope.to(x.dtype)
    half = cos.shape[-1]
    first, second, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
    rotated = [first * cos - second * sin, second * cos + first * sin]
    return torch.cat([*rotated, rest] if rest.shape[-1] else rotated, dim=-1)


def loss_and_gradients(
    hidden: Tensor, weight: Tensor, targets: Tensor, chunk_tokens: int, d_weight: Tensor, share: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return the mean loss of `ChunkedLoss` times `share` in fp32, and its gradient with respect to `hidden`. The
    gradient with respect to `weight` is added to `d_weight`. Both are computed in chunks, and no logits are saved."""
    loss = torch.zeros((), device=hidden.device, dtype=torch.float32)
    d_hidden = torch.empty_like(hidden)
    scale = torch.full((), share / len(targets), device=hidden.device)  # a Python number would be compiled in
    chunks = zip(hidden.split(chunk_tokens), targets.split(chunk_tokens), d_hidden.split(chunk_tokens), strict=True)
    for hidden_chunk, target_chunk, d_hidden_chunk in chunks:
        chunk_loss, d_logits = _loss_and_gradient(hidden_chunk @ weight.t(), target_chunk, scale)
        loss += chunk_loss
        torch.mm(d_logits, weight, out=d_hidden_chunk)
        d_weight.addmm_(d_logits.t(), hidden_chunk)
        del d_logits  # frees its memory before the next chunk's logits are allocated
    return loss, d_hidden


class ChunkedLoss(torch.autograd.Function):
    """`share` of the mean cross entropy of the logits hidden[tokens, hidden_size] @ weight[vocabulary, hidden_size]ᵀ.

    `targets` holds the correct tokens, [tokens] int64. The logits of at most `chunk_tokens` tokens exist at a time. The
    gradients are computed in the forward pass, so the backward pass must start here: a scaled copy of the weight's
    gradient would take 1 GiB for Llama 3 8B.
    """

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, targets: Tensor, chunk_tokens: int, share: float) -> Tensor:  # type: ignore[no-untyped-def]
        d_weight = torch.zeros_like(weight)
        loss, d_hidden = loss_and_gradients(hidden, weight, targets, chunk_tokens, d_weight, share)
        ctx.save_for_backward(d_hidden, d_weight)
        return loss

    @staticmethod
    def backward(ctx, _: Tensor):  # type: ignore[no-untyped-def]
        return *ctx.saved_tensors, None, None, None


@compiled_on_gpu
def _loss_and_gradient(logits: Tensor, targets: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return a chunk's summed loss times `scale`, and its gradient with respect to the logits, in the logits' dtype."""
    log_sum = torch.logsumexp(logits.float(), dim=-1, keepdim=True)
    probabilities = torch.exp(logits.float() - log_sum)
    one_hot = torch.arange(logits.shape[-1], device=logits.device)[None, :] == targets[:, None]
    loss = (log_sum - logits.gather(1, targets[:, None]).float()).sum() * scale
    return loss, ((probabilities - one_hot.float()) * scale).to(logits.dtype)
