"""Causal attention by kernels that return the logsumexp of the scores beside the output.

With the logsumexp (`lse`) the backward pass needs no autograd graph, and the attention over a long sequence is merged
from its parts.

Shapes in this module: q is [batch, heads, queries, head_size], k and v are [batch, kv_heads, keys, head_size], with any
strides but 1 in the last dimension. lse is [batch, heads, queries] in fp32. Gradients have the shapes of what they
belong to.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from workloads.timing import time_in_turns

aten = torch.ops.aten
Gradients = tuple[Tensor, Tensor, Tensor]


class Kernel(NamedTuple):
    """An attention kernel, forward and backward.

    Attributes:
        name: its name in logs and results.
        dtypes: the data types that it computes correctly. cuDNN's kernel does not refuse other ones.
        forward: (q, k, v, causal) to (out, lse).
        backward: (d_out, q, k, v, out, lse, causal) to (dq, dk, dv).
    """

    name: str
    dtypes: tuple[torch.dtype, ...]
    forward: Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor]]
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, bool], Gradients]


# These are the ATen functions that scaled_dot_product_attention calls; it does not return the lse itself. There is no
# dropout, so the backward functions never read the state of the random number generator that they require.


def _cudnn_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal)
    return out, lse.squeeze(-1)


def _cudnn_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> Gradients:
    rng_state = torch.zeros((), dtype=torch.int64, device=q.device)
    return aten._scaled_dot_product_cudnn_attention_backward(
        d_out,
        q,
        k,
        v,
        out,
        lse.unsqueeze(-1),
        rng_state,
        rng_state,
        None,
        None,
        None,
        q.shape[2],
        k.shape[2],
        0.0,
        causal,
    )


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
    return out, lse


def _flash_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> Gradients:
    rng_state = torch.zeros(2, dtype=torch.uint64, device=q.device)
    return aten._scaled_dot_product_flash_attention_backward(
        d_out, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, rng_state, rng_state
    )


# FlashAttention 4 (the package flash-attn-4) takes [batch, tokens, heads, head_size] and compiles at the first call.


def _flash4_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    from flash_attn.cute.interface import _flash_attn_fwd

    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out, lse, *_ = _flash_attn_fwd(q, k, v, causal=causal, return_lse=True)
    return out.transpose(1, 2), lse


def _flash4_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> Gradients:
    from flash_attn.cute.interface import _flash_attn_bwd

    q, k, v, out, d_out = (x.transpose(1, 2) for x in (q, k, v, out, d_out))
    dq, dk, dv, *_ = _flash_attn_bwd(q, k, v, out, d_out, lse, causal=causal)
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


# The memory-efficient kernel has no grouped-query attention: keys and values are repeated for each query head.


def _efficient_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    group_size = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group_size, 1), v.repeat_interleave(group_size, 1)
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal)
    return out, lse[..., : q.shape[2]]


def _efficient_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> Gradients:
    kv_heads = k.shape[1]
    group_size = q.shape[1] // kv_heads
    rng_state = torch.zeros((), dtype=torch.int64, device=q.device)
    # The kernel reads the lse in whole blocks of 32 queries.
    lse = torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32), value=float("inf"))
    dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
        d_out,
        q,
        k.repeat_interleave(group_size, 1),
        v.repeat_interleave(group_size, 1),
        None,
        out,
        lse,
        rng_state,
        rng_state,
        0.0,
        [True, True, True, False],
        causal,
    )
    return dq, dk.unflatten(1, (kv_heads, group_size)).sum(2), dv.unflatten(1, (kv_heads, group_size)).sum(2)


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)


def _cpu_backward(d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool) -> Gradients:
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(d_out, q, k, v, out, lse, 0.0, causal)


HALF_PRECISION = (torch.bfloat16, torch.float16)
KERNELS = {
    "cudnn": Kernel("cudnn", HALF_PRECISION, _cudnn_forward, _cudnn_backward),
    "flash": Kernel("flash", HALF_PRECISION, _flash_forward, _flash_backward),
    "flash4": Kernel("flash4", HALF_PRECISION, _flash4_forward, _flash4_backward),
    "efficient": Kernel("efficient", (*HALF_PRECISION, torch.float32), _efficient_forward, _efficient_backward),
    "cpu": Kernel("cpu", (*HALF_PRECISION, torch.float32), _cpu_forward, _cpu_backward),
}


@cache
def fastest_kernel(
    heads: int, kv_heads: int, head_size: int, length: int, device: torch.device, dtype: torch.dtype
) -> Kernel:
    """Return the kernel with the shortest forward and backward time for sequences of `length` tokens.

    The kernels are timed on random data in turns, and the minimum of three repeats counts. A kernel that fails is
    excluded and its reason is printed. A CPU has one kernel, which is returned untimed.

    Raises:
        RuntimeError: no kernel works on this device with this data type.
    """
    if device.type == "cpu":
        return KERNELS["cpu"]
    batch = max(1, 8192 // length)

    def random_heads(count: int) -> Tensor:
        return torch.randn(batch, min(length, 8192), count, head_size, dtype=dtype, device=device).transpose(1, 2)

    q, k, v, d_out = (random_heads(count) for count in (heads, kv_heads, kv_heads, heads))
    runs = {}
    for name, candidate in KERNELS.items():
        if dtype not in candidate.dtypes or name == "cpu":
            continue

        def run(kernel: Kernel = candidate) -> Gradients:
            out, lse = kernel.forward(q, k, v, True)
            return kernel.backward(d_out, q, k, v, out, lse, True)

        try:
            run()
        except Exception as error:  # not installed, not built, or not for this type or GPU: no common exception class
            reason = str(error).partition("\n")[0] or type(error).__name__
            print(f"attention kernel {name} is not available: {reason}")
            continue
        runs[name] = run
    if not runs:
        raise RuntimeError(f"no attention kernel works on {device} with dtype={dtype} and head_size={head_size}")
    times = time_in_turns(list(runs.values()), device, warmup=1, repeats=3, cold_cache=False)
    return KERNELS[min(zip(map(min, times), runs, strict=True))[1]]


def attend(
    kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, past_kv: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, ...]:
    """Return out and lse of queries that attend to all of `past_kv` and causally to their own keys and values."""
    out, lse = kernel.forward(q, k, v, True)
    if past_kv is None:
        return out, lse
    merge = _merge_attention if q.device.type == "cpu" else _compiled_merge_attention
    return merge(out, lse, *kernel.forward(q, *past_kv, False))


def _merge_attention(out: Tensor, lse: Tensor, past_out: Tensor, past_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Return out and lse over two groups of keys from those over each group."""
    merged_lse = torch.logaddexp(lse, past_lse)
    weight, past_weight = (lse - merged_lse).exp()[..., None], (past_lse - merged_lse).exp()[..., None]
    return (out * weight + past_out * past_weight).to(out.dtype), merged_lse


_compiled_merge_attention = torch.compile(_merge_attention, dynamic=False)


def attend_backward(
    kernel: Kernel,
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    past_kv: tuple[Tensor, Tensor] | None,
) -> tuple[Gradients, tuple[Tensor, Tensor] | None]:
    """Return (dq, dk, dv), and the gradients of `past_kv` or None.

    `out` and `lse` are those of `attend`, over all keys. With them the backward pass of each group of keys gives its
    exact part of the gradients (Dao 2023; Liu et al. 2023).
    """
    dq, dk, dv = kernel.backward(d_out, q, k, v, out, lse, True)
    if past_kv is None:
        return (dq, dk, dv), None
    past_dq, *d_past_kv = kernel.backward(d_out, q, *past_kv, out, lse, False)
    return (dq + past_dq, dk, dv), (d_past_kv[0], d_past_kv[1])
