"""The kernels of attention: selecting one, calling it forward and backward, and reading back which one ran."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import attention, functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from workloads.api.contract import Infeasible
from workloads.attention import AttentionParameters
from workloads.llama.attention_kernels import KERNELS, Gradients, rocm_attention_library
from workloads.llama.pytorch_attention import choose_backend, flash4_as_flash

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "flash4": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
    "aotriton": SDPBackend.FLASH_ATTENTION,
    "ck": SDPBackend.FLASH_ATTENTION,
    "aotriton_efficient": SDPBackend.EFFICIENT_ATTENTION,
}
# The kernels that are called by themselves: scaled_dot_product_attention does not have them.
PACKAGES = ("aiter", "flash_attn")
ROCM_LIBRARIES = {"aotriton": "aotriton", "ck": "ck", "aotriton_efficient": "aotriton"}
# Autograd's functions of the fused kernels (tools/autograd/derivatives.yaml). The unfused one has none of its own.
FUNCTIONS = {
    "ScaledDotProductFlashAttentionForCpuBackward0": "flash",
    "ScaledDotProductFlashAttentionBackward0": "flash",
    "ScaledDotProductCudnnAttentionBackward0": "cudnn",
    "ScaledDotProductEfficientAttentionBackward0": "efficient",
}


@dataclass(frozen=True)
class Inputs:
    """Queries, keys, values and the output's gradient: [batch, heads, tokens, head_size], tokens before heads."""

    q: Tensor
    k: Tensor
    v: Tensor
    d_out: Tensor

    @property
    def bytes(self) -> int:
        return sum(x.nbytes for x in (self.q, self.k, self.v, self.d_out))


@dataclass(frozen=True)
class AttentionCalls:
    """An attention over inputs of its own.

    Attributes:
        forward: returns the output.
        backward: returns the gradients of q, k and v, from what one earlier forward pass has kept.
        kernel: that ran in this forward pass.
    """

    inputs: Inputs
    forward: Callable[[], Tensor]
    backward: Callable[[], Gradients]
    kernel: str


def draw_inputs(parameters: AttentionParameters, device: torch.device, generator: torch.Generator) -> Inputs:
    """Draw normally distributed inputs in the memory layout of training, where a token's heads are neighbours."""

    def draw(heads: int) -> Tensor:
        size = (parameters.batch, parameters.sequence_length, heads, parameters.head_size)
        return torch.randn(size, dtype=DTYPES[parameters.dtype], device=device, generator=generator).transpose(1, 2)

    q, k, v = (draw(heads).requires_grad_() for heads in (parameters.heads, parameters.kv_heads, parameters.kv_heads))
    return Inputs(q, k, v, draw(parameters.heads))


@contextmanager
def selected(kernel: str) -> Iterator[None]:
    """Let scaled_dot_product_attention run by one kernel until the block ends.

    Raises:
        Infeasible: this machine lacks the kernel.
    """
    with ExitStack() as stack:
        if kernel in ROCM_LIBRARIES:
            try:
                stack.enter_context(rocm_attention_library(ROCM_LIBRARIES[kernel]))
            except RuntimeError as error:
                raise Infeasible(f"kernel={kernel}: {error}") from error
        if kernel == "flash4":
            stack.enter_context(flash4_as_flash())
        if kernel == "math":
            stack.enter_context(_math_in_its_own_type())
        if kernel in BACKENDS:
            stack.enter_context(sdpa_kernel(BACKENDS[kernel]))
        yield


@contextmanager
def _math_in_its_own_type() -> Iterator[None]:
    """Let the unfused attention multiply in the type of its inputs: by default PyTorch converts them to fp32."""
    before = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    try:
        yield
    finally:
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(before)


def build_calls(parameters: AttentionParameters, inputs: Inputs) -> AttentionCalls:
    """Return the calls of a kernel within its `selected` block, after one forward pass.

    Raises:
        Infeasible: the kernel does not support the inputs; the message has PyTorch's reasons.
    """
    if parameters.kernel in PACKAGES:
        return _build_package_calls(parameters, inputs)
    repeat = inputs.q.shape[1] // inputs.k.shape[1] if "efficient" in parameters.kernel else 1

    def forward() -> Tensor:
        # The memory-efficient kernel has no grouped heads: keys and values are repeated, which its time contains.
        k, v = (x.repeat_interleave(repeat, 1) if repeat > 1 else x for x in (inputs.k, inputs.v))
        return functional.scaled_dot_product_attention(
            inputs.q, k, v, is_causal=parameters.causal, enable_gqa=repeat == 1
        )

    choose_backend(inputs.q, *(x.repeat_interleave(repeat, 1) for x in (inputs.k, inputs.v)))
    out = _first_result(forward, parameters.kernel)

    def backward() -> Gradients:
        dq, dk, dv = torch.autograd.grad(out, (inputs.q, inputs.k, inputs.v), inputs.d_out, retain_graph=True)
        return dq, dk, dv

    return AttentionCalls(inputs, forward, backward, executed_kernel(out, parameters.kernel))


def _first_result(forward: Callable[[], Tensor], kernel: str) -> Tensor:
    """Return the output of the first call, of which FlashAttention 4 refuses some (_fa4.py)."""
    try:
        return forward()
    except RuntimeError as error:
        if kernel == "flash4" and "unsupported" in str(error):
            raise Infeasible(f"kernel={kernel}: {str(error).splitlines()[0]}") from error
        raise


def _build_package_calls(parameters: AttentionParameters, inputs: Inputs) -> AttentionCalls:
    """Return the calls of a package's own functions, which need no autograd graph."""
    kernel, causal = KERNELS[parameters.kernel], parameters.causal
    q, k, v = (x.detach() for x in (inputs.q, inputs.k, inputs.v))
    try:
        out, lse = kernel.forward(q, k, v, causal)
    except ImportError as error:
        raise Infeasible(f"kernel={parameters.kernel}: {error}") from error
    return AttentionCalls(
        inputs,
        lambda: kernel.forward(q, k, v, causal)[0],
        lambda: kernel.backward(inputs.d_out, q, k, v, out, lse, causal),
        kernel.name,
    )


def executed_kernel(out: Tensor, requested: str) -> str:
    """Return the kernel that computed `out`, as autograd's graph and PyTorch's settings have it now."""
    name = _fused_function(out)
    if name == "flash" and requested != "flash":
        if torch.version.hip:
            return _rocm_library()
        return {"FA4": "flash4"}.get(_flash_implementation() or "", name)
    if name == "efficient" and torch.version.hip:
        return f"{_rocm_library()}_efficient"
    return name


def _fused_function(out: Tensor) -> str:
    """Return the fused kernel in the graph of `out`, which PyTorch may have padded and sliced; `math` if none is."""
    pending = [out.grad_fn]
    while pending:
        node = pending.pop()
        if node is not None:
            if node.name() in FUNCTIONS:
                return FUNCTIONS[node.name()]
            pending += [source for source, _ in node.next_functions]
    return "math"


def _flash_implementation() -> str | None:
    current = getattr(attention, "current_flash_attention_impl", None)
    return current() if current else None


def _rocm_library() -> str:
    return str(torch.backends.cuda.preferred_rocm_fa_library()).rpartition(".")[2].lower()
