"""Check of an attention kernel's results against fp32, at the end of one sequence."""

from __future__ import annotations

from torch import Tensor, exp, inf, logsumexp

from workloads.llama.attention_kernels import Gradients

CHECKED_TOKENS = 128


def measure_error(
    q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, out: Tensor, lse: Tensor, gradients: Gradients
) -> float:
    """Return the largest error of a kernel's results over causal attention, relative to their norm; inf for a NaN.

    Compared are the last tokens of the first sequence, for the last head of keys and the queries that share it. Their
    queries attend to all keys, and their keys are attended by them alone, so that output, lse and all gradients follow
    without the scores of the other tokens (Dao 2023, algorithm 2). Shapes are those of `workloads.llama.attention`.
    """
    group, tokens = q.shape[1] // k.shape[1], min(CHECKED_TOKENS, q.shape[2])

    def end(x: Tensor, heads: int = group) -> Tensor:
        return x[0, -heads:, -tokens:].float()

    keys, values = k[0, -1].float(), v[0, -1].float()
    scale = q.shape[-1] ** -0.5
    scores = end(q) @ keys.t() * scale
    later = scores.new_ones(scores.shape[1:]).triu(1 + q.shape[2] - tokens).bool()
    exact_lse = logsumexp(scores.masked_fill(later, -inf), dim=-1)
    weights = exp(scores.masked_fill(later, -inf) - exact_lse[..., None])
    exact_out = weights @ values
    d_scores = weights * (end(d_out) @ values.t() - (end(d_out) * exact_out).sum(-1, keepdim=True)) * scale
    dq, dk, dv = gradients
    pairs = [
        (end(out), exact_out),
        (end(lse), exact_lse),
        (end(dq), d_scores @ keys),
        (end(dk, 1)[0], (d_scores[..., -tokens:].mT @ end(q)).sum(0)),
        (end(dv, 1)[0], (weights[..., -tokens:].mT @ end(d_out)).sum(0)),
    ]
    errors = [float((actual - exact).norm() / exact.norm()) for actual, exact in pairs]
    return max(error if error == error else inf for error in errors)
