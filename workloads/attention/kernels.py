"""The kernels of attention: selecting one, calling it forward and backward, and reading back which one ran."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import attention, functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from workloads.api.contract import Infeasible
from workloads.attention import AttentionParameters, rules
from workloads.llama.attention_kernels import KERNELS, Gradients, rocm_attention_library
from workloads.llama.pytorch_attention import choose_backend, flash4_as_flash

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
# Autograd's functions of the fused kernels (tools/autograd/derivatives.yaml). The unfused one has none of its own.
FUNCTIONS = {
    "ScaledDotProductFlashAttentionForCpuBackward0": "flash",
    "ScaledDotProductFlashAttentionBackward0": "flash",
    "ScaledDotProductCudnnAttentionBackward0": "cudnn",
    "ScaledDotProductEfficientAttentionBackward0": "efficient",
}


class Inputs(NamedTuple):
    """Queries, keys, values and the output's gradient: [batch, heads, tokens, head_size], tokens before heads."""

    q: Tensor
    k: Tensor
    v: Tensor
    d_out: Tensor

    @property
    def bytes(self) -> int:
        return sum(x.nbytes for x in self)


class AttentionCalls(NamedTuple):
    """The passes over some inputs: backward from what one earlier forward pass, by `kernel`, has kept."""

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
    """Let scaled_dot_product_attention run by one kernel until the block ends. Raises Infeasible if there is none."""
    rule = rules.KERNELS[kernel]
    with ExitStack() as stack:
        if rule.rocm_library:
            try:
                stack.enter_context(rocm_attention_library(rule.rocm_library))
            except RuntimeError as error:
                raise Infeasible(f"kernel={kernel}: {error}") from error
        if kernel == "flash4":
            stack.enter_context(flash4_as_flash())
        if kernel == "math":  # multiplies in the type of its inputs: by default PyTorch converts them to fp32
            allow = torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp
            stack.callback(allow, torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed())
            allow(True)
        if rule.backend:
            stack.enter_context(sdpa_kernel(getattr(SDPBackend, rule.backend)))
        yield


def build_calls(parameters: AttentionParameters, inputs: Inputs) -> AttentionCalls:
    """Return the calls of a kernel within its `selected` block, after one forward pass.

    Raises Infeasible with PyTorch's reasons if the kernel does not support the inputs.
    """
    if not rules.KERNELS[parameters.kernel].backend:  # a package's own functions, which need no autograd graph
        kernel, causal = KERNELS[parameters.kernel], parameters.causal
        q, k, v = (x.detach() for x in inputs[:3])
        try:
            kept_out, lse = kernel.forward(q, k, v, causal)
        except ImportError as error:
            raise Infeasible(f"kernel={parameters.kernel}: {error}") from error
        return AttentionCalls(
            inputs,
            lambda: kernel.forward(q, k, v, causal)[0],
            lambda: kernel.backward(inputs.d_out, q, k, v, kept_out, lse, causal),
            kernel.name,
        )
    repeat = inputs.q.shape[1] // inputs.k.shape[1] if "efficient" in parameters.kernel else 1

    def forward() -> Tensor:
        # The memory-efficient kernel has no grouped heads: keys and values are repeated, which its time contains.
        k, v = (x.repeat_interleave(repeat, 1) if repeat > 1 else x for x in (inputs.k, inputs.v))
        return functional.scaled_dot_product_attention(
            inputs.q, k, v, is_causal=parameters.causal, enable_gqa=repeat == 1
        )

    choose_backend(inputs.q, *(x.repeat_interleave(repeat, 1) for x in (inputs.k, inputs.v)))
    try:
        out = forward()
    except RuntimeError as error:
        if parameters.kernel == "flash4" and "unsupported" in str(error):  # it refuses some calls (_fa4.py)
            raise Infeasible(f"kernel=flash4: {str(error).splitlines()[0]}") from error
        raise

    def backward() -> Gradients:
        dq, dk, dv = torch.autograd.grad(out, (inputs.q, inputs.k, inputs.v), inputs.d_out, retain_graph=True)
        return dq, dk, dv

    return AttentionCalls(inputs, forward, backward, executed_kernel(out, parameters.kernel))


def executed_kernel(out: Tensor, requested: str) -> str:
    """Return the kernel that computed `out`, as autograd's graph and PyTorch's settings have it now."""
    name, pending = "math", [out.grad_fn]  # `math` if there is no fused function
    while name == "math" and pending:  # PyTorch may have padded and sliced the kernel's result
        if (node := pending.pop()) is not None:
            name = FUNCTIONS.get(node.name(), "math")
            pending += [source for source, _ in node.next_functions]
    if torch.version.hip and (name == "efficient" or (name == "flash" and requested != "flash")):
        library = str(torch.backends.cuda.preferred_rocm_fa_library()).rpartition(".")[2].lower()
        return f"{library}_efficient" if name == "efficient" else library
    if name == "flash" and requested != "flash":
        current = getattr(attention, "current_flash_attention_impl", lambda: None)()
        return "flash4" if current == "FA4" else name
    return name
