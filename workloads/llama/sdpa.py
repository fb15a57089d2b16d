"""PyTorch's scaled_dot_product_attention, which chooses its kernel itself: by fused kernels alone on a GPU."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from workloads.api.contract import Infeasible
from workloads.instruments import torch_internals
from workloads.llama.attention import KERNELS, AttentionShape, fastest_kernel
from workloads.llama.attention_rocm import rocm_attention_library
from workloads.llama.flash4 import can_replace_flash, flash4_as_flash

# cuDNN's attention before FlashAttention: on an H200 620 TFLOP/s forward against 320. The mathematical one stores all
# scores: a figure with it would be none of the device.
FUSED = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
NAMES = {SDPBackend.CUDNN_ATTENTION: "cudnn", SDPBackend.FLASH_ATTENTION: "flash"}


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return causal attention, [batch, heads, length, head_size] like q; k and v may have fewer heads."""
    return functional.scaled_dot_product_attention(q, *_repeat_kv_heads(q, k, v), is_causal=True, enable_gqa=True)


def _repeat_kv_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values with as many heads as the fused kernel for their type needs.

    On a GPU fp32 has the memory-efficient kernel alone, which takes no grouped heads on ROCm, nor in older versions on
    CUDA (can_use_mem_efficient_attention in sdp_utils.cpp).
    """
    if q.device.type == "cpu" or q.dtype != torch.float32:
        return k, v
    group_size = q.shape[1] // k.shape[1]
    return k.repeat_interleave(group_size, 1), v.repeat_interleave(group_size, 1)


@contextmanager
def fused_attention(shape: AttentionShape, device: torch.device) -> Iterator[str]:
    """Let `causal_attention` use fused kernels alone, and yield the name of the one that it takes for a shape.

    Code compiled within the context keeps the choice. On a CPU nothing changes, and the name is empty.

    Raises:
        Infeasible: no fused kernel supports the shape.
    """
    if device.type == "cpu":
        yield ""
        return
    library = choose_rocm_library(shape, device) if torch.version.hip else ""
    with rocm_attention_library(library) if library else nullcontext(), sdpa_kernel(FUSED, set_priority=True):
        backend = choose_backend(*_draw_inputs(shape, device))
        name = NAMES.get(backend, "efficient")
        yield f"{library} {name}".strip()


@contextmanager
def fastest_attention(shape: AttentionShape, device: torch.device) -> Iterator[str]:
    """As `fused_attention`, with FlashAttention 4 in the place of PyTorch's own where it is the fastest of all kernels.

    Raises:
        Infeasible: no fused kernel supports the shape.
    """
    if not _flash4_is_fastest(shape, device):
        with fused_attention(shape, device) as name:
            yield name
        return
    with flash4_as_flash(), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        choose_backend(*_draw_inputs(shape, device))
        yield "flash4"


def _flash4_is_fastest(shape: AttentionShape, device: torch.device) -> bool:
    """Return whether PyTorch can take FlashAttention 4, and it is the fastest kernel for a shape, timed in turns."""
    if device.type == "cpu" or not can_replace_flash():
        return False
    try:
        return fastest_kernel(shape, device).name == "flash4"
    except Infeasible:  # with PyTorch's reasons from `choose_backend`
        return False


def choose_rocm_library(shape: AttentionShape, device: torch.device) -> str:
    """Return the faster library of scaled_dot_product_attention on ROCm."""
    try:
        return fastest_kernel(shape, device, (KERNELS["aotriton"], KERNELS["ck"])).name
    except Infeasible:  # fp32, or a size that scaled_dot_product_attention pads: AOTriton has these
        return "aotriton"


def _draw_inputs(shape: AttentionShape, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    def allocate(heads: int) -> Tensor:
        size = (1, min(shape.length, 8192), heads, shape.head_size)
        return torch.empty(size, dtype=shape.dtype, device=device).transpose(1, 2).requires_grad_()

    q, k, v = (allocate(heads) for heads in (shape.heads, shape.kv_heads, shape.kv_heads))
    return q, *_repeat_kv_heads(q, k, v)


def choose_backend(q: Tensor, k: Tensor, v: Tensor) -> SDPBackend:
    """Return the kernel that scaled_dot_product_attention takes for these tensors, of those that are enabled.

    Raises:
        Infeasible: it would take none of them; the message has PyTorch's reasons.
    """
    with warnings.catch_warnings(record=True) as reasons:
        warnings.simplefilter("always")
        try:
            return torch_internals.choose_sdpa_backend(q, k, v)
        except RuntimeError as error:
            texts = [str(reason.message).partition(" (Triggered internally")[0] for reason in reasons]
            raise Infeasible(
                f"no fused attention kernel supports q {tuple(q.shape)} and k {tuple(k.shape)} in {q.dtype}, and the "
                f"mathematical one, which stores all scores, is not measured: {' '.join(texts) or error}"
            ) from error
