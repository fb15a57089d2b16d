"""Causal attention with kernels that return the logsumexp of the scores as well as the output.

Given the logsumexp (`lse`), the backward pass needs no autograd graph, and the attention outputs of the parts of a long
sequence can be merged.

Shapes in this module: q is [batch, heads, queries, head_size]; k and v are [batch, kv_heads, keys, head_size]. Only the
last dimension must have stride 1. lse is [batch, heads, queries] in fp32. Each gradient has the shape of its tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor

from workloads.api.contract import Infeasible
from workloads.api.notices import notify
from workloads.instruments.device import compiled_on_gpu
from workloads.instruments.timing import time_in_turns
from workloads.llama.attention_kernels import CPU_KERNEL, CUDA_KERNELS, ROCM_KERNELS, Gradients, Kernel
from workloads.models.model import Model

# The largest relative error allowed in a kernel's results. bf16 kernels differ from fp64 by 0.002 to 0.01.
TOLERANCE = 0.03
TIMED_TOKENS = 8192
# The gradients of the scores vanish for a single token. In bf16, they are off by 3% for two tokens and 0.4% for 16.
MIN_LENGTH = 16
CHECKED_TOKENS = 128
CHUNK_QUERIES = 1024  # number of queries per chunk; fp32 scores take 0.5 GiB for four heads of 32,768 keys
Pair = tuple[Tensor, Tensor]  # keys and values


@dataclass(frozen=True)
class AttentionShape:
    heads: int
    kv_heads: int
    head_size: int
    length: int
    dtype: torch.dtype

    @classmethod
    def of_model(cls, shape: Model, length: int, dtype: torch.dtype, tp: int = 1) -> AttentionShape:
        """Return the shape of attention over `length` tokens on one of `tp` ranks."""
        return cls(shape.heads // tp, shape.kv_heads // tp, shape.head_size, length, dtype)


def gpu_kernels() -> tuple[Kernel, ...]:
    return ROCM_KERNELS if torch.version.hip else CUDA_KERNELS


@cache
def fastest_kernel(shape: AttentionShape, device: torch.device, candidates: tuple[Kernel, ...] | None = None) -> Kernel:
    """Return the kernel with the shortest total forward and backward time for a shape.

    The candidates, by default all kernels for the GPU, are timed on random data in interleaved order; each kernel's
    time is the minimum of three repeats. A kernel that fails or gives wrong results is excluded with a notice of the
    reason. A single candidate is not timed. Raises Infeasible if no fused kernel works for this shape.
    """
    if device.type == "cpu" and candidates is None:
        return CPU_KERNEL
    length = min(max(shape.length, MIN_LENGTH), TIMED_TOKENS)

    def draw(heads: int) -> Tensor:
        size = (max(1, TIMED_TOKENS // length), length, heads, shape.head_size)
        return torch.randn(*size, dtype=shape.dtype, device=device).transpose(1, 2)

    inputs = [draw(heads) for heads in (shape.heads, shape.kv_heads, shape.kv_heads, shape.heads)]
    kernels, reasons = [], []
    for kernel in candidates or gpu_kernels():
        if reason := _unusable_reason(kernel, inputs):
            reasons.append(f"{kernel.name}: {reason}")
        else:
            kernels.append(kernel)
    if not kernels:
        raise Infeasible(
            f"no fused attention kernel works for {shape}, and the mathematical one, which stores all scores, is not "
            f"measured: {'; '.join(reasons)}"
        )
    if len(kernels) == 1:
        return kernels[0]
    runs = [partial(_run, kernel, inputs) for kernel in kernels]
    times = time_in_turns(runs, device, warmup=1, repeats=3, cold_cache=False)
    return kernels[times.index(min(times, key=min))]


def _run(kernel: Kernel, inputs: list[Tensor]) -> tuple[Tensor, Tensor, Gradients]:
    q, k, v, d_out = inputs
    out, lse = kernel.forward(q, k, v, True)
    return out, lse, kernel.backward(d_out, q, k, v, out, lse, True)


def _unusable_reason(kernel: Kernel, inputs: list[Tensor]) -> str:
    """Return why a kernel is excluded; empty if the kernel works and gives correct results."""
    if inputs[0].dtype not in kernel.dtypes:
        return f"it has no {inputs[0].dtype}"
    try:
        error = measure_error(inputs, *_run(kernel, inputs))
    except Exception as failure:  # not installed or built, or wrong type or GPU: there is no common exception class
        reason = str(failure).partition("\n")[0] or type(failure).__name__
        notify(f"attention kernel {kernel.name} is not available: {reason}")
        return reason
    if error <= TOLERANCE:
        return ""
    reason = f"its results differ by {error:.0%} from fp32"
    notify(f"attention kernel {kernel.name} is excluded: {reason}")
    return reason


def measure_error(inputs: list[Tensor], out: Tensor, lse: Tensor, gradients: Gradients) -> float:
    """Return the largest error of a kernel's results for the last tokens, as `largest_error` does."""
    exact = exact_results(*inputs, causal=True, tokens=min(CHECKED_TOKENS, out.shape[2]))
    return largest_error([out, *gradients, lse[..., None]], exact)


def exact_results(
    q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, *, causal: bool, tokens: int | None = None
) -> tuple[Tensor, ...]:
    """Return out, dq, dk, dv and lse of the last sequence, for its last key head and the query heads that share this
    head. With `tokens`, return those of the last tokens: with `causal`, no other queries attend to their keys.

    The results are computed from the definition (Dao 2023, section 2.2) in fp32, or in fp64 for fp32 inputs. The shapes
    are [heads, queries, head_size] for out and dq, [heads, queries, 1] for lse, and [keys, head_size] for dk and dv.
    """
    exact = torch.float64 if q.dtype == torch.float32 else torch.float32
    group, first = q.shape[1] // k.shape[1], q.shape[2] - tokens if tokens else 0
    q, d_out = (x.detach()[-1, -group:, first:].to(exact) for x in (q, d_out))
    k, v = (x.detach()[-1, -1].to(exact) for x in (k, v))
    scale, keys = q.shape[-1] ** -0.5, torch.arange(len(k), device=k.device)
    parts, dk, dv = [], torch.zeros_like(k), torch.zeros_like(v)
    for start in range(0, q.shape[1], CHUNK_QUERIES):
        q_part, d_out_part = (x[:, start : start + CHUNK_QUERIES] for x in (q, d_out))
        scores = q_part @ k.t() * scale
        if causal:
            queries = first + torch.arange(start, start + q_part.shape[1], device=k.device)
            scores.masked_fill_(keys > queries[:, None], -math.inf)
        weights = scores.softmax(-1)
        out = weights @ v
        d_scores = weights * (d_out_part @ v.t() - (d_out_part * out).sum(-1, keepdim=True)) * scale
        dk += (d_scores.mT @ q_part).sum(0)
        dv += (weights.mT @ d_out_part).sum(0)
        parts.append((out, scores.logsumexp(-1, keepdim=True), d_scores @ k))
    out, lse, dq = (torch.cat(pieces, dim=1) for pieces in zip(*parts, strict=True))
    return out, dq, dk[first:], dv[first:], lse


def largest_error(results: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """Return the largest relative error of `results`, which cover all heads and sequences; inf if there is a NaN."""
    errors = []
    for result, reference in zip(results, exact, strict=True):
        heads = reference.shape[0] if reference.dim() == 3 else 1
        actual = result.detach()[-1, -heads:, -reference.shape[-2] :].to(reference.dtype).view_as(reference)
        errors.append(float((actual - reference).norm() / reference.norm()))
    return max(error if error == error else math.inf for error in errors)


def attend(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, past_kv: Pair | None) -> tuple[Tensor, ...]:
    """Return out and lse for queries that attend to all of `past_kv` and causally to their own keys and values."""
    out, lse = kernel.forward(q, k, v, True)
    if past_kv is None:
        return out, lse
    return merge_attention(out, lse, *kernel.forward(q, *past_kv, False))


@compiled_on_gpu
def merge_attention(out: Tensor, lse: Tensor, past_out: Tensor, past_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge the results for two groups of keys. Return out, in the data type of `out`, and lse over both groups."""
    merged_lse = torch.logaddexp(lse, past_lse)
    weight, past_weight = (lse - merged_lse).exp()[..., None], (past_lse - merged_lse).exp()[..., None]
    return (out * weight + past_out * past_weight).to(out.dtype), merged_lse


def attend_backward(
    kernel: Kernel, d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, past_kv: Pair | None
) -> tuple[Gradients, Pair | None]:
    """Return (dq, dk, dv) and the gradients of `past_kv`, or None without `past_kv`.

    `out` and `lse` come from `attend` over all keys. Given these, the backward pass over each group of keys gives the
    group's exact part of the gradients (Dao 2023; Liu et al. 2023).
    """
    dq, dk, dv = kernel.backward(d_out, q, k, v, out, lse, True)
    if past_kv is None:
        return (dq, dk, dv), None
    past_dq, *d_past_kv = kernel.backward(d_out, q, *past_kv, out, lse, False)
    return (dq + past_dq, dk, dv), (d_past_kv[0], d_past_kv[1])
