"""Time one attention pass with one kernel, check its result, and read back which kernel ran."""

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import attention, functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from workloads.api.contract import Infeasible, Measurement, Rank
from workloads.attention import AttentionParameters, rules
from workloads.instruments.runs import check_error, measure_calls, prepare
from workloads.llama.attention import exact_results, largest_error
from workloads.llama.attention_kernels import KERNELS, Gradients, rocm_attention_library
from workloads.llama.pytorch_attention import choose_backend, flash4_as_flash

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
# Autograd's functions for the fused kernels (tools/autograd/derivatives.yaml). The unfused kernel has none.
FUNCTION = re.compile("ScaledDotProduct(Flash|Cudnn|Efficient)Attention(ForCpu)?Backward0")
# Largest relative error ‖X - ref‖ / ‖ref‖ of a correct result. Kernels in bf16 differ by 0.002 to 0.01 from fp64
# (workloads/llama/attention.py), and unfused attention rounds scores and weights too.
TOLERANCE = {"fp32": 1e-4, "fp16": 1e-2, "bf16": 3e-2}


class Inputs(NamedTuple):
    """Queries, keys, values and the output gradient: [batch, heads, tokens, head_size], with tokens first in memory."""

    q: Tensor
    k: Tensor
    v: Tensor
    d_out: Tensor


class AttentionCalls(NamedTuple):
    """Attention passes over fixed inputs. The backward pass uses tensors that a forward pass with `kernel` saved."""

    inputs: Inputs
    forward: Callable[[], Tensor]
    backward: Callable[[], Gradients]
    kernel: str


def measure(parameters: AttentionParameters, rank: Rank) -> Measurement:
    """Time one pass over random inputs. The time of every repeat is kept.

    Raises Infeasible if the device, or this build of PyTorch, does not support the combination of parameters, and
    ArithmeticError if the result is wrong.
    """
    device, architecture, generator = prepare(parameters, rank, rules.unsupported_reason)
    with selected(parameters.kernel):
        calls = build_calls(parameters, draw_inputs(parameters, device, generator))
        out, *gradients, _ = exact_results(*calls.inputs, causal=parameters.causal)
        is_forward = parameters.mode == "forward"
        error = largest_error([calls.forward()], [out]) if is_forward else largest_error(calls.backward(), gradients)
        name = f"{parameters.mode} attention by {calls.kernel} in {parameters.dtype}"
        check_error(name, error, TOLERANCE[parameters.dtype])
        del out, gradients

        def copy() -> Callable[[], object]:
            return getattr(build_calls(parameters, draw_inputs(parameters, device, generator)), parameters.mode)

        step, step_bytes = getattr(calls, parameters.mode), sum(x.nbytes for x in calls.inputs)
        measured = measure_calls(step, copy, step_bytes, device, parameters, rank.clock_mhz)
    q, k = calls.inputs.q, calls.inputs.k
    return replace(
        measured,
        # Parameters are read back from the run if possible.
        executed=vars(parameters)
        | {"batch": q.shape[0], "heads": q.shape[1], "kv_heads": k.shape[1], "sequence_length": q.shape[2]}
        | {"head_size": q.shape[3], "dtype": next(name for name, dtype in DTYPES.items() if dtype == q.dtype)}
        | {"kernel": calls.kernel, "repeats": len(measured.step_times_s), "seed": generator.initial_seed()},
        flops_per_step=parameters.flops,
        matrix_dtype=rules.matrix_dtype(parameters, architecture),
        metrics={"relative_error": error, **measured.metrics},
    )


def draw_inputs(parameters: AttentionParameters, device: torch.device, generator: torch.Generator) -> Inputs:
    """Draw normally distributed inputs in the memory layout of training, where a token's heads are adjacent."""

    def draw(heads: int) -> Tensor:
        size = (parameters.batch, parameters.sequence_length, heads, parameters.head_size)
        return torch.randn(size, dtype=DTYPES[parameters.dtype], device=device, generator=generator).transpose(1, 2)

    q, k, v = (draw(heads).requires_grad_() for heads in (parameters.heads, parameters.kv_heads, parameters.kv_heads))
    return Inputs(q, k, v, draw(parameters.heads))


@contextmanager
def selected(kernel: str) -> Iterator[None]:
    """Make scaled_dot_product_attention use one kernel within the block. Raises Infeasible if the kernel is missing."""
    rule = rules.KERNELS[kernel]
    with ExitStack() as stack:
        if rule.rocm_library:
            try:
                stack.enter_context(rocm_attention_library(rule.rocm_library))
            except RuntimeError as error:
                raise Infeasible(f"kernel={kernel}: {error}") from error
        if kernel == "flash4":
            stack.enter_context(flash4_as_flash())
        if kernel == "math":  # multiply in the inputs' type; by default, PyTorch converts inputs to fp32
            allow = torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp
            stack.callback(allow, torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed())
            allow(True)
        if rule.backend:
            stack.enter_context(sdpa_kernel(getattr(SDPBackend, rule.backend)))
        yield


def build_calls(parameters: AttentionParameters, inputs: Inputs) -> AttentionCalls:
    """Return a kernel's calls, for use in a `selected` block. Raises Infeasible with PyTorch's reasons."""
    causal = parameters.causal
    if not rules.KERNELS[parameters.kernel].backend:  # a package's functions need no autograd graph
        kernel = KERNELS[parameters.kernel]
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
        # The memory-efficient kernel has no grouped heads, so its time includes repeating keys and values.
        k, v = (x.repeat_interleave(repeat, 1) if repeat > 1 else x for x in (inputs.k, inputs.v))
        return functional.scaled_dot_product_attention(inputs.q, k, v, is_causal=causal, enable_gqa=repeat == 1)

    choose_backend(inputs.q, *(x.repeat_interleave(repeat, 1) for x in (inputs.k, inputs.v)))
    try:
        out = forward()
    except RuntimeError as error:
        if parameters.kernel == "flash4" and "unsupported" in str(error):  # flash4 rejects some calls (_fa4.py)
            raise Infeasible(f"kernel=flash4: {str(error).splitlines()[0]}") from error
        raise

    def backward() -> Gradients:
        dq, dk, dv = torch.autograd.grad(out, (inputs.q, inputs.k, inputs.v), inputs.d_out, retain_graph=True)
        return dq, dk, dv

    return AttentionCalls(inputs, forward, backward, executed_kernel(out, parameters.kernel))


def executed_kernel(out: Tensor, requested: str) -> str:
    """Return the kernel that computed `out`, according to autograd's graph and PyTorch's current settings."""
    name, pending = "math", [out.grad_fn]  # `math` if there is no fused function
    while name == "math" and pending:  # PyTorch may have padded and sliced the kernel's result
        if (node := pending.pop()) is not None:
            name = match[1].lower() if (match := FUNCTION.fullmatch(node.name())) else "math"
            pending += [source for source, _ in node.next_functions]
    if torch.version.hip and (name == "efficient" or (name == "flash" and requested != "flash")):
        library = str(torch.backends.cuda.preferred_rocm_fa_library()).rpartition(".")[2].lower()
        return f"{library}_efficient" if name == "efficient" else library
    if name == "flash" and requested != "flash":
        current = getattr(attention, "current_flash_attention_impl", lambda: None)()
        return "flash4" if current == "FA4" else name
    return name
