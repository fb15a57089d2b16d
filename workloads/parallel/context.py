"""Context parallelism: causal attention over a sequence that is divided over ranks.

Each rank has a part from the front of the sequence and one from its back, so that all ranks do the same work. Keys and
values are gathered, and each part attends to itself and the parts before it (Dubey et al. 2024, 3.3.2), or they go from
rank to rank in a ring while attention to those that are there is computed (Liu et al. 2023, Ring Attention with
Blockwise Transformers). Of another rank's parts a rank needs either the first one, for all of its queries, or both, for
its second half of queries: all ranks do the same work in every hop.

PyTorch's own context parallelism is a prototype that is being replaced; this needs only its attention kernels and
collectives.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from workloads.layouts.layout import ContextMethod
from workloads.llama.attention import attend, attend_backward, merge_attention
from workloads.llama.attention_kernels import Kernel


def _select_visible(length: int, rank: int, source: int) -> tuple[slice, slice, bool]:
    """Return which of a rank's queries see which keys of `source`, both with `length` tokens, and if causally."""
    whole = slice(0, length)
    if source == rank:
        return whole, whole, True
    if source < rank:
        return whole, slice(0, length // 2), False
    return slice(length // 2, length), whole, False


class _Hop:
    """A tensor on its way to the next rank, and the one that arrives from the rank before."""

    def __init__(self, tensor: Tensor, group: dist.ProcessGroup) -> None:
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        self._arriving = torch.empty_like(tensor)
        operations = [
            dist.P2POp(dist.isend, tensor, group=group, group_peer=(rank + 1) % ranks),
            dist.P2POp(dist.irecv, self._arriving, group=group, group_peer=(rank - 1) % ranks),
        ]
        self._works = dist.batch_isend_irecv(operations)

    def wait(self) -> Tensor:  # the one that has arrived; the sent one may be overwritten from then on
        for work in self._works:
            work.wait()
        return self._arriving


class RingAttention(torch.autograd.Function):
    """Causal attention of this rank's queries to the keys and values of all ranks."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, kernel: Kernel, group: dist.ProcessGroup) -> Tensor:  # type: ignore[no-untyped-def]
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        keys_values = torch.cat([k, v], dim=1)
        out, lse = torch.empty(0), torch.empty(0)
        for hop in range(ranks):
            coming = _Hop(keys_values, group) if hop < ranks - 1 else None
            rows, columns, causal = _select_visible(q.shape[2], rank, (rank - hop) % ranks)
            part_k, part_v = keys_values[:, :, columns].chunk(2, dim=1)
            part_out, part_lse = kernel.forward(q[:, :, rows], part_k, part_v, causal)
            if hop == 0:
                out, lse = part_out.float(), part_lse.clone()  # in fp32, since each hop adds to it
            else:
                merged = merge_attention(out[:, :, rows], lse[:, :, rows], part_out, part_lse)
                out[:, :, rows], lse[:, :, rows] = merged
            keys_values = coming.wait() if coming else keys_values
        out = out.to(q.dtype)
        ctx.kernel, ctx.group = kernel, group
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, d_out: Tensor):  # type: ignore[no-untyped-def]
        q, k, v, out, lse = ctx.saved_tensors
        ranks, rank = dist.get_world_size(ctx.group), dist.get_rank(ctx.group)
        keys_values = torch.cat([k, v], dim=1)
        d_q = torch.zeros_like(q, dtype=torch.float32)
        d_coming: _Hop | None = None
        for hop in range(ranks):
            coming = _Hop(keys_values, ctx.group) if hop < ranks - 1 else None
            rows, columns, causal = _select_visible(q.shape[2], rank, (rank - hop) % ranks)
            part_k, part_v = keys_values[:, :, columns].chunk(2, dim=1)
            row_d_out, row_out, row_lse = (tensor[:, :, rows].contiguous() for tensor in (d_out, out, lse))
            part_d_q, *part_d_kv = ctx.kernel.backward(
                row_d_out, q[:, :, rows], part_k, part_v, row_out, row_lse, causal
            )
            d_q[:, :, rows] += part_d_q
            # The gradient of these keys and values travels behind them, and arrives at their rank after the last hop.
            d_keys_values = d_coming.wait() if d_coming else torch.zeros_like(keys_values, dtype=torch.float32)
            d_keys_values[:, :, columns] += torch.cat(part_d_kv, dim=1)
            d_coming = _Hop(d_keys_values, ctx.group)
            keys_values = coming.wait() if coming else keys_values
        assert d_coming is not None
        d_k, d_v = d_coming.wait().to(q.dtype).chunk(2, dim=1)
        return d_q.to(q.dtype), d_k, d_v, None, None


def local_positions(length: int, cp: int, rank: int) -> Tensor:
    """Return the positions of a rank's tokens in a sequence of `length`, in the order in which the rank has them."""
    parts = torch.arange(length).chunk(2 * cp)
    return torch.cat([parts[rank], parts[2 * cp - 1 - rank]])


class ContextAttention:
    """Causal attention over a group of ranks. q, k, v: of this rank's tokens, [batch, heads, length, head_size]."""

    def __init__(self, kernel: Kernel, group: dist.ProcessGroup, method: ContextMethod = "allgather") -> None:
        self.kernel, self._group, self._function = kernel, group, _FUNCTIONS[method]

    @property
    def method(self) -> ContextMethod:  # by the function that runs
        return next(method for method, function in _FUNCTIONS.items() if function is self._function)

    @torch.compiler.disable
    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = self._function.apply(q, k, v, self.kernel, self._group)
        return out


class _AllGatherAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, kernel: Kernel, group: dist.ProcessGroup) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.kernel, ctx.group = kernel, group
        keys_values = _all_gather_sequence(torch.cat([k, v], dim=1), group)
        outs, lses = [], []
        for part in _split(q, keys_values, group):
            out, lse = attend(kernel, part.q, part.k, part.v, part.earlier)
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
        parts = zip(_split(q, keys_values, ctx.group), d_out.chunk(2, dim=2), (out0, out1), (lse0, lse1), strict=True)
        for part, d_out_part, out, lse in parts:
            (d_q_part, d_k_part, d_v_part), d_earlier = attend_backward(
                ctx.kernel, d_out_part.contiguous(), part.q, part.k, part.v, out, lse, part.earlier
            )
            d_q.append(d_q_part)
            d_k[:, :, part.positions] += d_k_part
            d_v[:, :, part.positions] += d_v_part
            if d_earlier is not None:
                d_k[:, :, : part.positions.start] += d_earlier[0]
                d_v[:, :, : part.positions.start] += d_earlier[1]
        d_k_local, d_v_local = _reduce_scatter_sequence(d_keys_values.to(q.dtype), ctx.group).chunk(2, dim=1)
        return torch.cat(d_q, dim=2), d_k_local, d_v_local, None, None


_FUNCTIONS: dict[ContextMethod, type[torch.autograd.Function]] = {
    "allgather": _AllGatherAttention,
    "ring": RingAttention,
}


class _Part(NamedTuple):
    """One of a rank's two parts of the sequence, with its own tokens' queries, keys and values."""

    q: Tensor
    k: Tensor
    v: Tensor
    earlier: tuple[Tensor, Tensor] | None  # the keys and values of all tokens before it
    positions: slice  # where it stands in the sequence


def _split(q: Tensor, keys_values: Tensor, group: dist.ProcessGroup) -> Iterator[_Part]:
    """Yield this rank's two parts: of its queries and of the gathered keys and values."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    k, v = keys_values.chunk(2, dim=1)
    for q_part, index in zip(q.chunk(2, dim=2), (rank, 2 * ranks - 1 - rank), strict=True):
        size = q_part.shape[2]
        positions = slice(index * size, (index + 1) * size)
        earlier = (k[:, :, : positions.start], v[:, :, : positions.start]) if index else None
        yield _Part(q_part, k[:, :, positions], v[:, :, positions], earlier, positions)


def _all_gather_sequence(local: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return all tokens of the sequence in order, of each rank's tokens [batch, heads, length, head_size]."""
    ranks = dist.get_world_size(group)
    gathered = [torch.empty_like(local, memory_format=torch.contiguous_format) for _ in range(ranks)]
    dist.all_gather(gathered, local.contiguous(), group=group)
    fronts, backs = zip(*(rank_tokens.chunk(2, dim=2) for rank_tokens in gathered), strict=True)
    return torch.cat([*fronts, *reversed(backs)], dim=2)


def _reduce_scatter_sequence(full: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's tokens of the sum over ranks."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    parts = full.chunk(2 * ranks, dim=2)
    pairs = [torch.cat([parts[r], parts[2 * ranks - 1 - r]], dim=2) for r in range(ranks)]
    local = torch.empty_like(pairs[rank])
    dist.reduce_scatter(local, pairs, group=group)
    return local
