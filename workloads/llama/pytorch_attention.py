"""Attention with PyTorch's public functions: scaled_dot_product_attention, and attention within packed documents."""

import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import attention, functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from workloads.api.contract import Infeasible
from workloads.instruments import torch_internals
from workloads.llama.attention import AttentionShape, fastest_kernel
from workloads.llama.attention_kernels import KERNELS, rocm_attention_library
from workloads.models.flops import document_lengths

# cuDNN's attention comes before FlashAttention: its forward pass reaches 620 TFLOP/s on an H200, FlashAttention's 320.
# The math kernel is left out: it stores all scores, so its rate would not describe the device.
FUSED = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
NAMES = {SDPBackend.CUDNN_ATTENTION: "cudnn", SDPBackend.FLASH_ATTENTION: "flash"}


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return causal attention, [batch, heads, length, head_size] like q; k and v may have fewer heads."""
    return functional.scaled_dot_product_attention(q, *_repeat_kv_heads(q, k, v), is_causal=True, enable_gqa=True)


def _repeat_kv_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values with as many heads as the fused kernel for their type needs. On a GPU, only the
    memory-efficient kernel supports fp32. That kernel does not accept grouped heads on ROCm, or on CUDA in older
    versions (can_use_mem_efficient_attention in sdp_utils.cpp)."""
    if q.device.type == "cpu" or q.dtype != torch.float32:
        return k, v
    group_size = q.shape[1] // k.shape[1]
    return k.repeat_interleave(group_size, 1), v.repeat_interleave(group_size, 1)


@contextmanager
def fused_attention(shape: AttentionShape, device: torch.device) -> Iterator[str]:
    """Let `causal_attention` use only fused kernels, and yield the name of the kernel that it uses for a shape.

    Code that is compiled within the context keeps this choice. On a CPU, the context has no effect and yields an empty
    name. Raises Infeasible if no fused kernel supports the shape.
    """
    if device.type == "cpu":
        yield ""
        return
    library = choose_rocm_library(shape, device) if torch.version.hip else ""
    with rocm_attention_library(library) if library else nullcontext(), sdpa_kernel(FUSED, set_priority=True):
        backend = choose_backend(*_draw_inputs(shape, device))
        yield f"{library} {NAMES.get(backend, 'efficient')}".strip()


@contextmanager
def fastest_attention(shape: AttentionShape, device: torch.device) -> Iterator[str]:
    """Allow only fused kernels, as in `fused_attention`, with FlashAttention 4 as the flash kernel if it is fastest."""
    flash4_is_fastest = False
    if device.type != "cpu" and can_replace_flash():
        with suppress(Infeasible):  # `choose_backend` raises this error with PyTorch's reasons
            flash4_is_fastest = fastest_kernel(shape, device).name == "flash4"
    if flash4_is_fastest:
        with flash4_as_flash(), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            choose_backend(*_draw_inputs(shape, device))
            yield "flash4"
    else:
        with fused_attention(shape, device) as name:
            yield name


def choose_rocm_library(shape: AttentionShape, device: torch.device) -> str:
    """Return the library that runs scaled_dot_product_attention faster on ROCm."""
    try:
        return fastest_kernel(shape, device, (KERNELS["aotriton"], KERNELS["ck"])).name
    except Infeasible:  # fp32, or a size that scaled_dot_product_attention pads: AOTriton supports these
        return "aotriton"


def _draw_inputs(shape: AttentionShape, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    def allocate(heads: int) -> Tensor:
        size = (1, min(shape.length, 8192), heads, shape.head_size)
        return torch.empty(size, dtype=shape.dtype, device=device).transpose(1, 2).requires_grad_()

    q, k, v = (allocate(heads) for heads in (shape.heads, shape.kv_heads, shape.kv_heads))
    return q, *_repeat_kv_heads(q, k, v)


def choose_backend(q: Tensor, k: Tensor, v: Tensor) -> SDPBackend:
    """Return the kernel that scaled_dot_product_attention selects. Raises Infeasible with PyTorch's reasons."""
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


def can_replace_flash() -> bool:
    """Return whether this PyTorch has the switch that replaces the flash kernel."""
    return not torch.version.hip and hasattr(attention, "activate_flash_attention_impl")


@contextmanager
def flash4_as_flash() -> Iterator[None]:
    """Replace PyTorch's flash kernel with FlashAttention 4 within the context, or raise Infeasible."""
    if not can_replace_flash():
        raise Infeasible(f"kernel=flash4 needs torch 2.11 or later for CUDA, this is {torch.__version__}")
    register = partial(torch_internals.register_flash4, "workloads.llama.flash4_functions")
    attention.register_flash_attention_impl("FA4", register_fn=register)
    try:
        attention.activate_flash_attention_impl("FA4")
    except (ImportError, OSError, RuntimeError) as error:
        raise Infeasible(f"kernel=flash4: pip install 'gpu-sweeper[flash4]' ({str(error).splitlines()[0]})") from error
    try:
        yield
    finally:
        attention.restore_flash_attention_impl()


def document_offsets(lengths: Tensor) -> Tensor:
    """Return each document's start among all tokens, then the token count, given lengths[sequences, documents]."""
    return functional.pad(lengths.flatten().cumsum(0), (1, 0)).to(torch.int32)


class DocumentAttention:
    """PyTorch's variable-length attention on a GPU, which skips masked pairs, or a masked reference on a CPU."""

    def __init__(self, sequence_length: int, document_tokens: int, device: torch.device) -> None:
        self.document_tokens = document_tokens
        self.name = "masked scaled_dot_product_attention" if device.type == "cpu" else "varlen_attn"
        self._longest = max(document_lengths(sequence_length, document_tokens))
        self._function = _attend_masked if device.type == "cpu" else _load_varlen()

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor) -> Tensor:
        """Return attention [batch, heads, length, head_size], like q; k and v may have fewer heads."""
        return self._function(q, k, v, offsets, self._longest)


def _load_varlen() -> Callable[..., Tensor]:
    """Return attention with PyTorch's function, imported on first use, because its module imports the compiler."""
    from torch.nn.attention.varlen import varlen_attn

    # Older versions accept grouped heads without a flag (torch 2.11).
    grouped: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}

    def attend_varlen(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, longest: int) -> Tensor:
        query, key, value = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (q, k, v))
        out: Any = varlen_attn(query, key, value, offsets, offsets, longest, longest, window_size=(-1, 0), **grouped)
        attn_out: Tensor = out.unflatten(0, (q.shape[0], q.shape[2])).transpose(1, 2)
        return attn_out

    return attend_varlen


def find_varlen_ops() -> set[Any]:
    """Return the operations of PyTorch's variable-length attention: one, or none before it is loaded."""
    operation = getattr(torch.ops.torch_attn, "_varlen_attn", None)
    return {operation.default} if operation else set()


def _attend_masked(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, longest: int) -> Tensor:
    batch, length = q.shape[0], q.shape[2]
    positions = torch.arange(batch * length, device=q.device, dtype=offsets.dtype)
    documents = torch.searchsorted(offsets, positions, right=True).view(batch, 1, length)
    is_same_document = documents[:, :, :, None] == documents[:, :, None, :]
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=is_same_document.tril(), enable_gqa=True)
