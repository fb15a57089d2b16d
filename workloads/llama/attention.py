"""Causal attention as its kernels give it: with the logarithm of the sums, so that a result can be kept without its
graph, and a long sequence can attend to what is before it part by part.

q is [batch, heads, queries, head_size], k and v [batch, kv_heads, keys, head_size], of any strides with the last one 1;
lse is [batch, heads, queries], fp32.
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
    """forward(q, k, v, causal) → out, lse; backward(d_out, q, k, v, out, lse, causal) → dq, dk, dv.

    dtypes: what it computes rightly; asked for another one cuDNN does not refuse
    """

    name: str
    dtypes: tuple[torch.dtype, ...]
    forward: Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor]]
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, bool], Gradients]


# PyTorch's own functions under scaled_dot_product_attention, which hides the lse. There is no dropout, so what the
# backward functions ask about its random numbers is never read.


def _cudnn_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal)
    return out, lse.squeeze(-1)


def _cudnn_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> Gradients:
    random = torch.zeros((), dtype=torch.int64, device=q.device)
    return aten._scaled_dot_product_cudnn_attention_backward(
        d_out, q, k, v, out, lse.unsqueeze(-1), random, random, None, None, None, q.shape[2], k.shape[2], 0.0, causal
    )


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
    return out, lse


def _flash_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> Gradients:
    random = torch.zeros(2, dtype=torch.uint64, device=q.device)
    return aten._scaled_dot_product_flash_attention_backward(
        d_out, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, random, random
    )


# FlashAttention 4 (the package flash-attn-4): its heads stand beside a token, and it compiles itself when first called.


def _flash4_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    from flash_attn.cute.interface import _flash_attn_fwd

    q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))
    out, lse, *_ = _flash_attn_fwd(q, k, v, causal=causal, return_lse=True)
    return out.transpose(1, 2), lse


def _flash4_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> Gradients:
    from flash_attn.cute.interface import _flash_attn_bwd

    q, k, v, out, d_out = (heads.transpose(1, 2) for heads in (q, k, v, out, d_out))
    dq, dk, dv, *_ = _flash_attn_bwd(q, k, v, out, d_out, lse, causal=causal)
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


def _efficient_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    each = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(each, 1), v.repeat_interleave(each, 1)
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal)
    return out, lse[..., : q.shape[2]]


def _efficient_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> Gradients:
    each, random = q.shape[1] // k.shape[1], torch.zeros((), dtype=torch.int64, device=q.device)
    lse = torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32), value=float("inf"))  # the kernel reads whole blocks
    dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
        *(d_out, q, k.repeat_interleave(each, 1), v.repeat_interleave(each, 1), None, out, lse, random, random, 0.0),
        [True, True, True, False],
        causal,
    )
    return dq, dk.unflatten(1, (k.shape[1], each)).sum(2), dv.unflatten(1, (v.shape[1], each)).sum(2)


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)


def _cpu_backward(d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool) -> Gradients:
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(d_out, q, k, v, out, lse, 0.0, causal)


HALF = (torch.bfloat16, torch.float16)
KERNELS = {
    "cudnn": Kernel("cudnn", HALF, _cudnn_forward, _cudnn_backward),
    "flash": Kernel("flash", HALF, _flash_forward, _flash_backward),
    "flash4": Kernel("flash4", HALF, _flash4_forward, _flash4_backward),
    "efficient": Kernel("efficient", (*HALF, torch.float32), _efficient_forward, _efficient_backward),
    "cpu": Kernel("cpu", (*HALF, torch.float32), _cpu_forward, _cpu_backward),
}


@cache
def fastest(heads: int, kv_heads: int, head_size: int, length: int, device: torch.device, dtype: torch.dtype) -> Kernel:
    """The kernel that takes the least time forward and backward, of those that this device and type have. What is left
    out says why in the log. Raises RuntimeError where none works."""
    if device.type == "cpu":
        return KERNELS["cpu"]
    batch = max(1, 8192 // length)

    def heads_of(count: int) -> Tensor:
        return torch.randn(batch, min(length, 8192), count, head_size, dtype=dtype, device=device).transpose(1, 2)

    q, k, v, d_out = (heads_of(n) for n in (heads, kv_heads, kv_heads, heads))
    runs = {}
    for name, each in KERNELS.items():
        if dtype not in each.dtypes or name == "cpu":
            continue

        def run(kernel: Kernel = each) -> Gradients:
            out, lse = kernel.forward(q, k, v, True)
            return kernel.backward(d_out, q, k, v, out, lse, True)

        try:
            run()
        except Exception as error:  # not installed, not built, or not for this type or GPU: each says so in its own way
            print(f"attention by {name} is left out: {str(error).partition(chr(10))[0] or type(error).__name__}")
            continue
        runs[name] = run
    if not runs:
        raise RuntimeError(f"no kernel of attention works here in {dtype} with heads of {head_size}")
    times = time_in_turns(list(runs.values()), device, warmup=1, repeats=3, cold_cache=False)
    return KERNELS[min(zip(map(min, times), runs, strict=True))[1]]


def attend(
    kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, earlier: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, ...]:
    """out and lse of queries that see `earlier` keys and values whole, and their own causally."""
    out, lse = kernel.forward(q, k, v, True)
    if earlier is None:
        return out, lse
    return (_merged if q.device.type == "cpu" else _compiled_merged)(out, lse, *kernel.forward(q, *earlier, False))


def _merged(out: Tensor, lse: Tensor, more: Tensor, lse_more: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over two groups of keys, of that over each."""
    both = torch.logaddexp(lse, lse_more)
    share, share_more = (lse - both).exp()[..., None], (lse_more - both).exp()[..., None]
    return (out * share + more * share_more).to(out.dtype), both


_compiled_merged = torch.compile(_merged, dynamic=False)


def attend_backward(
    kernel: Kernel,
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    earlier: tuple[Tensor, Tensor] | None,
) -> tuple[Gradients, tuple[Tensor, Tensor] | None]:
    """dq, dk, dv, and those of the earlier keys and values. With the whole's out and lse the backward pass of each part
    gives its exact share (Dao 2023; Liu et al. 2023)."""
    dq, dk, dv = kernel.backward(d_out, q, k, v, out, lse, True)
    if earlier is None:
        return (dq, dk, dv), None
    dq_before, *d_earlier = kernel.backward(d_out, q, *earlier, out, lse, False)
    return (dq + dq_before, dk, dv), (d_earlier[0], d_earlier[1])
