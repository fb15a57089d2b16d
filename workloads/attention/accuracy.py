"""The error of an attention's results against exact ones, over the heads that share one head of keys."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, inf

# Largest relative error ‖X - ref‖ / ‖ref‖ of a correct result. Kernels in bf16 differ by 0.002 to 0.01 from fp64
# (workloads/llama/attention.py), and unfused attention rounds scores and weights too.
TOLERANCE = {"fp32": 1e-4, "fp16": 1e-2, "bf16": 3e-2}
CHUNK_QUERIES = 1024  # whose scores are computed at a time: 0.5 GiB in fp32 for four heads of 32,768 keys


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
