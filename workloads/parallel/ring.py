"""Ring attention: keys and values go from rank to rank while attention to those that are there is computed.

Liu et al. 2023 (Ring Attention with Blockwise Transformers), with the parts of `workloads.parallel.context`: a rank has
one from the front of the sequence and one from its back. So of another rank's parts it needs either the first one, for
all of its queries, or both, for its second half of queries: all ranks do the same work in every hop.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from workloads.llama.attention import merge_attention
from workloads.llama.attention_kernels import Kernel


class _Visible(NamedTuple):
    """What a rank computes with another rank's keys: the queries and keys, as slices of both parts, and the mask."""

    queries: slice
    keys: slice
    causal: bool


def _select_visible(length: int, rank: int, source: int) -> _Visible:
    """Return which of a rank's queries see which keys of `source`, both with `length` tokens."""
    whole = slice(0, length)
    if source == rank:
        return _Visible(whole, whole, True)
    if source < rank:
        return _Visible(whole, slice(0, length // 2), False)
    return _Visible(slice(length // 2, length), whole, False)


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

    def wait(self) -> Tensor:
        """Return the tensor that has arrived. The sent one may be overwritten from then on."""
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
