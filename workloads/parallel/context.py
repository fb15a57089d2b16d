"""Context parallelism: causal attention over a sequence that is divided among ranks.

Each rank has one part from the front of the sequence and one from the back, so all ranks do the same amount of work.
With `allgather`, keys and values are gathered, and each part attends to itself and the parts before it (Dubey et al.
2024, 3.3.2). With `ring`, they move around a ring while attention to the parts that have arrived is computed (Liu et
al. 2023, Ring Attention with Blockwise Transformers). In the ring, a rank needs either another rank's first part for
all of its own queries, or both parts for the second half of its queries, so all ranks do the same work in every hop.

PyTorch's own context parallelism is a prototype that is being replaced; this module needs only PyTorch's attention
kernels and collectives.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from workloads.layouts.layout import ContextMethod
from workloads.llama.attention import attend, attend_backward, merge_attention
from workloads.llama.attention_kernels import KERNELS, Kernel

Attended = tuple[Tensor, Tensor, Tensor]  # out, lse, and the keys and values for the backward pass


def _select_visible(length: int, rank: int, source: int) -> tuple[slice, slice, bool]:
    """Return which of a rank's `length` queries see which of the `length` keys of `source`, and whether causally."""
    whole = slice(0, length)
    if source == rank:
        return whole, whole, True
    if source < rank:
        return whole, slice(0, length // 2), False
    return slice(length // 2, length), whole, False


class _Hop:
    """A tensor on its way to the next rank, and the tensor that arrives from the previous rank."""

    def __init__(self, tensor: Tensor, group: dist.ProcessGroup) -> None:
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        self._arriving = torch.empty_like(tensor)
        operations = [
            dist.P2POp(dist.isend, tensor, group=group, group_peer=(rank + 1) % ranks),
            dist.P2POp(dist.irecv, self._arriving, group=group, group_peer=(rank - 1) % ranks),
        ]
        self._works = dist.batch_isend_irecv(operations)

    def wait(self) -> Tensor:  # the arrived tensor; afterwards, the sent tensor may be overwritten
        for work in self._works:
            work.wait()
        return self._arriving


def _ring_forward(kernel: Kernel, group: dist.ProcessGroup, q: Tensor, k: Tensor, v: Tensor) -> Attended:
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    local = keys_values = torch.cat([k, v], dim=1)
    out, lse = torch.empty(0), torch.empty(0)
    for hop in range(ranks):
        coming = _Hop(keys_values, group) if hop < ranks - 1 else None
        rows, columns, causal = _select_visible(q.shape[2], rank, (rank - hop) % ranks)
        part_k, part_v = keys_values[:, :, columns].chunk(2, dim=1)
        part_out, part_lse = kernel.forward(q[:, :, rows], part_k, part_v, causal)
        if hop == 0:
            out, lse = part_out.float(), part_lse.clone()  # in fp32, since each hop adds to the output
        else:
            merged = merge_attention(out[:, :, rows], lse[:, :, rows], part_out, part_lse)
            out[:, :, rows], lse[:, :, rows] = merged
        keys_values = coming.wait() if coming else keys_values
    return out.to(q.dtype), lse, local


def _ring_backward(
    kernel: Kernel, group: dist.ProcessGroup, d_out: Tensor, q: Tensor, keys_values: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor]:
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    d_q = torch.zeros_like(q, dtype=torch.float32)
    d_coming: _Hop | None = None
    for hop in range(ranks):
        coming = _Hop(keys_values, group) if hop < ranks - 1 else None
        rows, columns, causal = _select_visible(q.shape[2], rank, (rank - hop) % ranks)
        part_k, part_v = keys_values[:, :, columns].chunk(2, dim=1)
        row_d_out, row_out, row_lse = (tensor[:, :, rows].contiguous() for tensor in (d_out, out, lse))
        part_d_q, *part_d_kv = kernel.backward(row_d_out, q[:, :, rows], part_k, part_v, row_out, row_lse, causal)
        d_q[:, :, rows] += part_d_q
        # The gradient of these keys and values follows them around the ring and reaches their rank after the last hop.
        d_keys_values = d_coming.wait() if d_coming else torch.zeros_like(keys_values, dtype=torch.float32)
        d_keys_values[:, :, columns] += torch.cat(part_d_kv, dim=1)
        d_coming = _Hop(d_keys_values, group)
        keys_values = coming.wait() if coming else keys_values
    assert d_coming is not None
    return d_q.to(q.dtype), d_coming.wait().to(q.dtype)


def local_positions(length: int, cp: int, rank: int) -> Tensor:
    """Return the positions of a rank's tokens in a sequence of `length`, in the order in which the rank holds them."""
    parts = torch.arange(length).chunk(2 * cp)
    return torch.cat([parts[rank], parts[2 * cp - 1 - rank]])


class ContextAttention:
    """Causal attention over a group of ranks, for this rank's q, k and v, each [batch, heads, length, head_size]."""

    def __init__(self, kernel: Kernel, group: dist.ProcessGroup, method: ContextMethod = "allgather") -> None:
        self.name, self.method = kernel.name, method
        self._group_name = group.group_name
        _GROUPS[group.group_name] = group

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = attend_over_ranks(q, k, v, self.name, self._group_name, self.method)[0]
        return out


# The groups of this process by name, because operations of `torch.library` do not accept objects. Names count from 0 in
# each trial, so code compiled for one trial can be used in the next.
_GROUPS: dict[str, dist.ProcessGroup] = {}


# To the compiler, this is one operation, with its collectives. A block with it is one graph, and selective
# checkpointing saves its results. PyTorch's disk cache identifies it only by name: rename it if result shapes change.
@torch.library.custom_op("gpu_sweeper::attend_over_ranks", mutates_args=())
def attend_over_ranks(
    q: Tensor, k: Tensor, v: Tensor, kernel: str, group: str, method: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Return out, lse, and the keys and values for the backward pass, from all ranks or only from this rank."""
    out, lse, keys_values = _METHODS[method][0](KERNELS[kernel], _GROUPS[group], q, k, v)
    return out.contiguous(), lse.contiguous(), keys_values.contiguous()


@torch.library.custom_op("gpu_sweeper::attend_over_ranks_backward", mutates_args=())
def _attend_over_ranks_backward(
    d_out: Tensor, q: Tensor, keys_values: Tensor, out: Tensor, lse: Tensor, kernel: str, group: str, method: str
) -> tuple[Tensor, Tensor]:
    d_q, d_keys_values = _METHODS[method][1](KERNELS[kernel], _GROUPS[group], d_out, q, keys_values, out, lse)
    return d_q.contiguous(), d_keys_values.contiguous()


@attend_over_ranks.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, kernel: str, group: str, method: str) -> Attended:
    batch, heads, length, head_size = q.shape
    kept = length * (dist.get_world_size(_GROUPS[group]) if method == "allgather" else 1)
    lse = q.new_empty((batch, heads, length), dtype=torch.float32)
    return q.new_empty(q.shape), lse, k.new_empty((batch, 2 * k.shape[1], kept, head_size))


@_attend_over_ranks_backward.register_fake
def _(
    d_out: Tensor, q: Tensor, keys_values: Tensor, out: Tensor, lse: Tensor, kernel: str, group: str, method: str
) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty((q.shape[0], keys_values.shape[1], *q.shape[2:]))


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Attended) -> None:
    q, _, _, *ctx.names = inputs
    out, lse, keys_values = output
    ctx.save_for_backward(q, keys_values, out, lse)
    ctx.mark_non_differentiable(lse, keys_values)


def _backward(ctx: Any, d_out: Tensor, *_: Any) -> tuple[Any, ...]:
    q, keys_values, out, lse = ctx.saved_tensors
    d_q, d_keys_values = _attend_over_ranks_backward(d_out.contiguous(), q, keys_values, out, lse, *ctx.names)
    return d_q, *d_keys_values.chunk(2, dim=1), None, None, None


attend_over_ranks.register_autograd(_backward, setup_context=_save_for_backward)
ATTEND_OVER_RANKS = torch.ops.gpu_sweeper.attend_over_ranks.default


def _gathered_forward(kernel: Kernel, group: dist.ProcessGroup, q: Tensor, k: Tensor, v: Tensor) -> Attended:
    keys_values = _all_gather_sequence(torch.cat([k, v], dim=1), group)
    parts = _split(q, keys_values, group)
    outs, lses = zip(*(attend(kernel, part.q, part.k, part.v, part.earlier) for part in parts), strict=True)
    return torch.cat(outs, dim=2), torch.cat(lses, dim=2), keys_values


def _gathered_backward(
    kernel: Kernel, group: dist.ProcessGroup, d_out: Tensor, q: Tensor, keys_values: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor]:
    d_keys_values = torch.zeros_like(keys_values, dtype=torch.float32)
    d_k, d_v = d_keys_values.chunk(2, dim=1)
    d_q = []
    halves = zip(*(tensor.chunk(2, dim=2) for tensor in (d_out, out, lse)), strict=True)
    for part, half in zip(_split(q, keys_values, group), halves, strict=True):
        d_out_part, out_part, lse_part = (tensor.contiguous() for tensor in half)
        (d_q_part, d_k_part, d_v_part), d_earlier = attend_backward(
            kernel, d_out_part, part.q, part.k, part.v, out_part, lse_part, part.earlier
        )
        d_q.append(d_q_part)
        d_k[:, :, part.positions] += d_k_part
        d_v[:, :, part.positions] += d_v_part
        if d_earlier is not None:
            d_k[:, :, : part.positions.start] += d_earlier[0]
            d_v[:, :, : part.positions.start] += d_earlier[1]
    return torch.cat(d_q, dim=2), _reduce_scatter_sequence(d_keys_values.to(q.dtype), group)


_METHODS: dict[str, tuple[Callable[..., Attended], Callable[..., tuple[Tensor, Tensor]]]] = {
    "allgather": (_gathered_forward, _gathered_backward),
    "ring": (_ring_forward, _ring_backward),
}


class _Part(NamedTuple):
    """One of a rank's two parts of the sequence, with the queries, keys and values of the part's tokens."""

    q: Tensor
    k: Tensor
    v: Tensor
    earlier: tuple[Tensor, Tensor] | None  # the keys and values of all tokens before this part
    positions: slice  # the part's positions in the sequence


def _split(q: Tensor, keys_values: Tensor, group: dist.ProcessGroup) -> Iterator[_Part]:
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    k, v = keys_values.chunk(2, dim=1)
    for q_part, index in zip(q.chunk(2, dim=2), (rank, 2 * ranks - 1 - rank), strict=True):
        size = q_part.shape[2]
        positions = slice(index * size, (index + 1) * size)
        earlier = (k[:, :, : positions.start], v[:, :, : positions.start]) if index else None
        yield _Part(q_part, k[:, :, positions], v[:, :, positions], earlier, positions)


def _all_gather_sequence(local: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return all tokens of the sequence in order, from each rank's tokens [batch, heads, length, head_size]."""
    gathered = local.new_empty((dist.get_world_size(group), *local.shape))
    dist.all_gather_into_tensor(gathered.flatten(0, 1), local.contiguous(), group=group)
    fronts, backs = zip(*(rank_tokens.chunk(2, dim=2) for rank_tokens in gathered), strict=True)
    return torch.cat([*fronts, *reversed(backs)], dim=2)


def _reduce_scatter_sequence(full: Tensor, group: dist.ProcessGroup) -> Tensor:
    ranks = dist.get_world_size(group)
    parts = full.chunk(2 * ranks, dim=2)
    local = full.new_empty((2, *parts[0].shape))
    by_rank = [parts[part] for rank in range(ranks) for part in (rank, -1 - rank)]
    dist.reduce_scatter_tensor(local, torch.stack(by_rank), group=group)
    return torch.cat(list(local), dim=2)
