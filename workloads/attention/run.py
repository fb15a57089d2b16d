"""Time one pass of attention and check its result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, inf

from workloads.api.contract import Infeasible, Measurement, Rank
from workloads.api.recipes import unsupported_rate_reason
from workloads.attention import AttentionParameters, rules
from workloads.attention.kernels import DTYPES, AttentionCalls, build_calls, draw_inputs, selected
from workloads.instruments import device as devices
from workloads.instruments.runs import measure_calls

# Largest relative error ‖X - ref‖ / ‖ref‖ of a correct result. Kernels in bf16 differ by 0.002 to 0.01 from fp64
# (workloads/llama/attention.py), and unfused attention rounds scores and weights too.
TOLERANCE = {"fp32": 1e-4, "fp16": 1e-2, "bf16": 3e-2}
CHUNK_QUERIES = 1024  # whose scores are computed at a time: 0.5 GiB in fp32 for four heads of 32,768 keys


def measure(parameters: AttentionParameters, rank: Rank) -> Measurement:
    """Time one pass over random inputs; the time of every repeat is kept.

    Raises:
        Infeasible: the device, or this build of PyTorch, does not support the combination of parameters.
        ArithmeticError: the result is wrong.
    """
    device = devices.device_of(rank)
    architecture = devices.architecture(device)
    if reason := unsupported_rate_reason(parameters.dtype, architecture):
        raise Infeasible(f"dtype={parameters.dtype} is {reason}")
    if reason := rules.unsupported_reason(parameters, architecture):
        raise Infeasible(reason)
    generator = torch.Generator(device=device).manual_seed(parameters.seed)

    with selected(parameters.kernel):
        calls = build_calls(parameters, draw_inputs(parameters, device, generator))
        error = _checked_error(parameters, calls)

        def copy() -> Callable[[], object]:
            return _timed_pass(parameters, build_calls(parameters, draw_inputs(parameters, device, generator)))

        measured = measure_calls(_timed_pass(parameters, calls), copy, calls.inputs.bytes, device, parameters)
    q, k = calls.inputs.q, calls.inputs.k
    return replace(
        measured,
        # Read back where that is possible.
        executed=vars(parameters)
        | {"batch": q.shape[0], "heads": q.shape[1], "kv_heads": k.shape[1], "sequence_length": q.shape[2]}
        | {"head_size": q.shape[3], "dtype": next(name for name, dtype in DTYPES.items() if dtype == q.dtype)}
        | {"kernel": calls.kernel, "repeats": len(measured.step_times_s), "seed": generator.initial_seed()},
        flops_per_step=parameters.flops,
        matrix_dtype=rules.matrix_dtype(parameters, architecture),
        metrics={"relative_error": error, **measured.metrics},
    )


def _timed_pass(parameters: AttentionParameters, calls: AttentionCalls) -> Callable[[], object]:
    return calls.forward if parameters.mode == "forward" else calls.backward


def _checked_error(parameters: AttentionParameters, calls: AttentionCalls) -> float:
    """Return the relative error of the pass that is timed. Raises ArithmeticError if it exceeds the tolerance."""
    out, *gradients = exact_results(*calls.inputs, causal=parameters.causal)
    if parameters.mode == "forward":
        error = largest_error((calls.forward(),), (out,))
    else:
        error = largest_error(calls.backward(), gradients)
    if not error <= (limit := TOLERANCE[parameters.dtype]):
        raise ArithmeticError(
            f"{parameters.mode} attention by {calls.kernel} in {parameters.dtype} is wrong: relative error "
            f"{error:.2e}, more than {limit:.0e}"
        )
    return error


def exact_results(q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, *, causal: bool) -> tuple[Tensor, ...]:
    """Return out, dq, dk and dv of the last sequence, for its last head of keys and the queries that share it.

    They are computed in fp32, and in fp64 for inputs in fp32, from the definition (Dao 2023, section 2.2). Shapes are
    [heads, queries, head_size] for out and dq, [keys, head_size] for dk and dv.
    """
    exact = torch.float64 if q.dtype == torch.float32 else torch.float32
    group = q.shape[1] // k.shape[1]
    q, d_out = (x.detach()[-1, -group:].to(exact) for x in (q, d_out))
    k, v = (x.detach()[-1, -1].to(exact) for x in (k, v))
    scale, keys = q.shape[-1] ** -0.5, torch.arange(len(k), device=k.device)
    parts, dk, dv = [], torch.zeros_like(k), torch.zeros_like(v)
    for start in range(0, q.shape[1], CHUNK_QUERIES):
        q_part, d_out_part = (x[:, start : start + CHUNK_QUERIES] for x in (q, d_out))
        scores = q_part @ k.t() * scale
        if causal:
            queries = torch.arange(start, start + q_part.shape[1], device=k.device)
            scores.masked_fill_(keys > queries[:, None], -inf)
        weights = scores.softmax(-1)
        out = weights @ v
        d_scores = weights * (d_out_part @ v.t() - (d_out_part * out).sum(-1, keepdim=True)) * scale
        dk += (d_scores.mT @ q_part).sum(0)
        dv += (weights.mT @ d_out_part).sum(0)
        parts.append((out, d_scores @ k))
    out, dq = (torch.cat(pieces, dim=1) for pieces in zip(*parts, strict=True))
    return out, dq, dk, dv


def largest_error(results: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """Return the largest relative error of results, each with all heads and sequences; inf for a NaN."""
    errors = []
    for result, reference in zip(results, exact, strict=True):
        heads = reference.shape[0] if reference.dim() == 3 else 1
        actual = result.detach()[-1, -heads:].to(reference.dtype).view_as(reference)
        errors.append(float((actual - reference).norm() / reference.norm()))
    return max(error if error == error else inf for error in errors)
