"""Row sums in Triton. Each output is written once, regardless of the order of the summed rows."""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

TILE = 4096  # elements that a program writes, from at most 1024 features


@triton.jit
def sum_rows_kernel(
    x, rows, out, outputs, features, TERMS: tl.constexpr, BLOCK_OUTPUTS: tl.constexpr, BLOCK_FEATURES: tl.constexpr
):
    i = tl.program_id(0).to(tl.int64) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    feature = tl.program_id(1) * BLOCK_FEATURES + tl.arange(0, BLOCK_FEATURES)
    mask = (i < outputs)[:, None] & (feature < features)[None, :]
    total = tl.zeros([BLOCK_OUTPUTS, BLOCK_FEATURES], tl.float32)
    for j in tl.static_range(TERMS):
        row = tl.load(rows + i * TERMS + j, mask=i < outputs, other=-1)
        is_here = mask & (row >= 0)[:, None]
        total += tl.load(x + row[:, None] * features + feature[None, :], mask=is_here, other=0.0).to(tl.float32)
    tl.store(out + i[:, None] * features + feature[None, :], total.to(out.dtype.element_ty), mask=mask)


def launch_sum_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Compute `workloads.llama.grouped.sum_rows` for contiguous tensors on a GPU."""
    (outputs, terms), features = rows.shape, x.shape[1]
    out = x.new_empty((outputs, features))
    block_features = min(1024, triton.next_power_of_2(features))
    block_outputs = TILE // block_features
    grid = (triton.cdiv(outputs, block_outputs), triton.cdiv(features, block_features))
    sum_rows_kernel[grid](
        x, rows.contiguous(), out, outputs, features, terms, block_outputs, block_features, num_warps=4
    )
    return out
