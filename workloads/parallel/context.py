"""Context parallelism: each rank has a part from the front of the sequence and one from its back, so that all have the
same work; keys and values are gathered, and each part attends to those before it (Dubey et al. 2024, 3.3.2).

PyTorch's own is a prototype that is being replaced; this needs nothing but its attention kernels and two collectives.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from workloads.llama.attention import Kernel, attend, attend_backward


def positions(length: int, context: int, rank: int) -> Tensor:
    """Which tokens of a sequence a rank has, in their order."""
    parts = torch.arange(length).chunk(2 * context)
    return torch.cat([parts[rank], parts[2 * context - 1 - rank]])


class ContextAttention:
    """Causal attention over a group of ranks. q, k, v: of this rank's tokens, [batch, heads, length, head_size]."""

    def __init__(self, kernel: Kernel, group: dist.ProcessGroup) -> None:
        self.kernel, self._group = kernel, group

    @torch.compiler.disable
    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = _Gathered.apply(q, k, v, self.kernel, self._group)
        return out


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, kernel: Kernel, group: dist.ProcessGroup) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.kernel, ctx.group = kernel, group
        keys_values = _gather(torch.cat([k, v], dim=1), group)
        outs, lses = [], []
        for mine, k_own, v_own, earlier in _parts(q, keys_values, group):
            out, lse = attend(kernel, mine, k_own, v_own, earlier)
            outs.append(out)
            lses.append(lse)
        ctx.save_for_backward(q, keys_values, *outs, *lses)
        return torch.cat(outs, dim=2)

    @staticmethod
    def backward(ctx, d_out: Tensor):  # type: ignore[no-untyped-def]
        q, keys_values, out0, out1, lse0, lse1 = ctx.saved_tensors
        d_keys_values = torch.zeros_like(keys_values, dtype=torch.float32)
        d_k, d_v = d_keys_values.chunk(2, dim=1)
        d_q = []
        parts = zip(_parts(q, keys_values, ctx.group), d_out.chunk(2, dim=2), (out0, out1), (lse0, lse1), strict=True)
        for (mine, k_own, v_own, earlier), d_mine, out, lse in parts:
            before = 0 if earlier is None else earlier[0].shape[2]
            own = slice(before, before + k_own.shape[2])
            (dq, dk, dv), d_earlier = attend_backward(
                ctx.kernel, d_mine.contiguous(), mine, k_own, v_own, out, lse, earlier
            )
            d_q.append(dq)
            d_k[:, :, own] += dk
            d_v[:, :, own] += dv
            if d_earlier is not None:
                d_k[:, :, :before] += d_earlier[0]
                d_v[:, :, :before] += d_earlier[1]
        dk, dv = _scatter(d_keys_values.to(q.dtype), ctx.group).chunk(2, dim=1)
        return torch.cat(d_q, dim=2), dk, dv, None, None


def _parts(q: Tensor, keys_values: Tensor, group: dist.ProcessGroup):  # type: ignore[no-untyped-def]
    """Of this rank's two parts: queries, keys and values of the same tokens, and those before them."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    k, v = keys_values.chunk(2, dim=1)
    for mine, part in zip(q.chunk(2, dim=2), (rank, 2 * ranks - 1 - rank), strict=True):
        size = mine.shape[2]
        own = slice(part * size, (part + 1) * size)
        earlier = (k[:, :, : own.start], v[:, :, : own.start]) if part else None
        yield mine, k[:, :, own], v[:, :, own], earlier


def _order(ranks: int) -> list[int]:
    """Where in the sequence's order of parts the gathered ones, two of each rank, stand."""
    given = [part for rank in range(ranks) for part in (rank, 2 * ranks - 1 - rank)]
    return [given.index(part) for part in range(2 * ranks)]


def _gather(mine: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All tokens of the sequence, in order, of what each rank has of them [batch, heads, length, head_size]."""
    ranks = dist.get_world_size(group)
    found = [torch.empty_like(mine, memory_format=torch.contiguous_format) for _ in range(ranks)]
    dist.all_gather(found, mine.contiguous(), group=group)
    parts = [half for each in found for half in each.chunk(2, dim=2)]
    return torch.cat([parts[n] for n in _order(ranks)], dim=2)


def _scatter(whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over ranks, of it this rank's tokens."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    parts = whole.chunk(2 * ranks, dim=2)
    pairs = [torch.cat([parts[r], parts[2 * ranks - 1 - r]], dim=2) for r in range(ranks)]
    mine = torch.empty_like(pairs[rank])
    dist.reduce_scatter(mine, pairs, group=group)
    return mine
