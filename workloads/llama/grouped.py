"""Grouped GEMMs and row sums as `torch.library` operations, which keep a compiled block in one graph.

Token rows are sorted by expert, and the offsets between experts stay on the device. Nothing waits for the host, and
each expert multiplies only its own rows, without padding. PyTorch traces its own grouped GEMM only in bf16.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from workloads.instruments.trace import annotate


@torch.library.custom_op("gpu_sweeper::multiply_groups", mutates_args=())
def multiply_groups(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """Return a[rows of e] · b[e] for every expert e: [rows, n] for a[rows, k] and b[experts, k, n].

    If b is [rows, n], the sum is over rows: a[:, rows of e] · b[rows of e], [experts, k, n] for a[k, rows]. `ends`,
    [experts] int32, holds the index after each expert's last row; an expert may have no rows. Results after the last
    expert's rows are undefined; on a CPU they are -inf so that tests find code that reads them.
    """
    with annotate("experts"):
        if a.device.type != "cpu":
            return functional.grouped_mm(a, b, offs=ends).contiguous()
        parts = [slice(start, end) for start, end in pairwise([0, *ends.tolist()])]
        if b.dim() == 2:
            return torch.stack([a[:, part] @ b[part] for part in parts])
        products = [a[part] @ matrix for part, matrix in zip(parts, b, strict=True)]
        return torch.cat([*products, a.new_full((len(a) - parts[-1].stop, b.shape[2]), float("-inf"))])


@multiply_groups.register_fake
def _(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    return a.new_empty((*ends.shape, a.shape[0], b.shape[1]) if b.dim() == 2 else (a.shape[0], b.shape[2]))


def _multiply_backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
    a, b, ends = ctx.saved_tensors
    d_out = d_out.contiguous()
    # b is the transpose of the weights, and the gradient has the layout of the weights.
    return multiply_groups(d_out, b.mT, ends), multiply_groups(d_out.t(), a, ends).mT, None


multiply_groups.register_autograd(
    _multiply_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
)


@torch.library.custom_op("gpu_sweeper::sum_rows", mutates_args=())
def sum_rows(x: Tensor, rows: Tensor, uses: Tensor) -> Tensor:
    """Return the sum of x[rows[i, j]] over j for every i, in fp32, rounded once. With a single term, rows are copied.

    Args:
        x: [rows, features].
        rows: [outputs, terms] int64, where no row occurs twice in one output; -1 adds nothing.
        uses: [rows of x, uses of each] int64, the outputs that use a row, padded with -1. The row's gradient is the sum
            over these outputs.
    """
    with annotate("permutation"):
        if x.device.type != "cpu":
            from workloads.llama.grouped_kernels import launch_sum_rows  # Triton, which a CPU's build of torch lacks

            return launch_sum_rows(x.contiguous(), rows)
        return (x[rows.clamp(min=0)] * (rows >= 0)[..., None]).sum(dim=1)


@sum_rows.register_fake
def _(x: Tensor, rows: Tensor, uses: Tensor) -> Tensor:
    return x.new_empty((rows.shape[0], x.shape[1]))


def _sum_rows_backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
    rows, uses = ctx.saved_tensors
    return sum_rows(d_out.contiguous(), uses, rows), None, None


sum_rows.register_autograd(
    _sum_rows_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs[1:])
)
