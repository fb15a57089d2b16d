"""The casts of `workloads.llama.fp8_quantize`, computed by the kernels of `workloads.llama.fp8_kernels`.

With granularity `tensor`, the largest magnitude of a matrix must be known before the cast, so every cast takes two
passes over its inputs. The first keeps only the maximum of the computed values; the second recomputes the values and
writes them in fp8. A block's scale depends only on the block, so casts with granularity `block` read inputs once.

Fp8 GEMMs on a Hopper GPU take operands that are contiguous along the summed dimension. A matrix [tokens, features] is
therefore written by rows for GEMMs that sum over features, by columns (transposed) for GEMMs that sum over tokens, or
both from one tile that is read once.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from workloads.llama import fp8_kernels as kernels
from workloads.llama.fp8_quantize import BLOCK, FP8, SCALE_MULTIPLE, Casts, Fp8Matrix

FLAT_BLOCK = 1024  # elements that a program reads at a time
REDUCING_PROGRAMS = 2048  # programs that share a reduction over a whole matrix
NORM_BACKWARD_PROGRAMS = 1056  # eight per multiprocessor of an H200

# The fastest of three to eight candidates per kernel on an H200; of six candidates with granularity `tensor`.
CAST_TENSOR_TILE = {"BLOCK_TOKENS": 128, "BLOCK_FEATURES": 64, "num_warps": 8}
SWIGLU_BACKWARD_TENSOR_TILE = {"BLOCK_TOKENS": 64, "BLOCK_FEATURES": 64, "num_warps": 8}
CAST_ROWS_TILE = {"BLOCK_TOKENS": 64, "BLOCK_FEATURES": BLOCK, "num_warps": 8}
CAST_COLUMNS_TILE = {"BLOCK_TOKENS": BLOCK, "BLOCK_FEATURES": 64, "num_warps": 4}
CAST_BOTH_TILE = {"BLOCK_TOKENS": BLOCK, "BLOCK_FEATURES": BLOCK, "num_warps": 8}
SWIGLU_TILE = {"BLOCK_TOKENS": 32, "BLOCK_FEATURES": BLOCK, "num_warps": 4}
SWIGLU_BACKWARD_ROWS_TILE = {"BLOCK_TOKENS": 64, "BLOCK_FEATURES": BLOCK, "num_warps": 8}
SWIGLU_BACKWARD_COLUMNS_TILE = {"BLOCK_TOKENS": BLOCK, "BLOCK_FEATURES": 64, "num_warps": 8}


class TritonCasts(Casts):
    """`Casts` on a GPU."""

    def cast(
        self, x: Tensor, *, rows: bool = False, columns: bool = False, scale: Tensor | None = None
    ) -> list[Fp8Matrix]:
        if self.granularity == "tensor" and scale is None:
            partial = _allocate_partial_maxima(x.device)
            kernels.amax_kernel[(REDUCING_PROGRAMS,)](x, x, partial, x.numel(), SWIGLU=False, BLOCK=FLAT_BLOCK)
            scale = _find_scale(partial)
        return _cast(x, rows, columns, scale)

    def cast_weight(
        self, weight: Tensor, scale: Tensor | None = None, *, rows: bool = False, columns: bool = False
    ) -> list[Fp8Matrix]:
        if self.granularity == "tensor":
            return self.cast(weight, rows=rows, columns=columns, scale=scale)
        outputs, inputs = weight.shape
        by_rows = _allocate_weight(outputs, inputs, weight.device) if rows else None
        by_columns = _allocate_weight(inputs, outputs, weight.device) if columns else None
        strides = [matrix.scale.stride(0) if matrix else 0 for matrix in (by_rows, by_columns)]
        targets = (*(by_rows or (weight, weight)), *(by_columns or (weight, weight)))
        kernels.cast_weight_block_kernel[(outputs * inputs // BLOCK**2,)](
            weight, *targets, outputs, inputs, *strides, ROWS=rows, COLUMNS=columns, BLOCK=BLOCK, num_warps=8
        )
        return [matrix for matrix in (by_rows, by_columns) if matrix is not None]

    def add_and_norm(
        self, x: Tensor, addend: Tensor | None, weight: Tensor, eps: float, scale: Tensor | None
    ) -> tuple[Tensor, Fp8Matrix]:
        tokens, features = x.shape
        total = x if addend is None else torch.empty_like(x)
        rows = _allocate(tokens, features, x.device, scale)
        inputs = (x, x if addend is None else addend, weight, x if scale is None else scale)
        flags = {"ADD": addend is not None, "SCALED": scale is not None, "SIZE": triton.next_power_of_2(features)}
        kernels.norm_kernel[(tokens,)](*inputs, total, *rows, tokens, features, eps, **flags, BLOCK=BLOCK, num_warps=4)
        return total, rows

    def norm_backward(
        self, x: Tensor, weight: Tensor, d_out: Tensor, d_residual: Tensor, eps: float, scale: Tensor | None
    ) -> tuple[Tensor, Tensor, Fp8Matrix]:
        tokens, features = x.shape
        d_x = torch.empty_like(x)
        row_factors = torch.empty(tokens, dtype=torch.float32, device=x.device)  # each row's factor in the norm of x
        programs = min(NORM_BACKWARD_PROGRAMS, tokens)
        d_weight = torch.empty(programs, features, dtype=torch.float32, device=x.device)
        tensors = (x, weight, d_out, d_residual, d_x, d_weight, row_factors)
        block = triton.next_power_of_2(features)
        kernels.norm_backward_kernel[(programs,)](*tensors, tokens, features, eps, BLOCK=block, num_warps=4)
        (columns,) = _cast(x, False, True, scale, (row_factors, weight))
        return d_x, d_weight.sum(0).to(weight.dtype), columns

    def swiglu(self, gate: Tensor, up: Tensor) -> Fp8Matrix:
        (tokens, features), numel = gate.shape, gate.numel()
        if self.granularity == "block":
            rows, tile = _allocate(tokens, features, gate.device), SWIGLU_TILE
            grid = _grid(tokens, features, tile)
            kernels.swiglu_block_kernel[grid](gate, up, *rows, tokens, features, **tile)
            return rows
        partial = _allocate_partial_maxima(gate.device)
        kernels.amax_kernel[(REDUCING_PROGRAMS,)](gate, up, partial, numel, SWIGLU=True, BLOCK=FLAT_BLOCK)
        rows = _allocate(tokens, features, gate.device, _find_scale(partial))
        grid = (triton.cdiv(numel, FLAT_BLOCK),)
        kernels.swiglu_tensor_kernel[grid](gate, up, rows.scale, rows.data, numel, BLOCK=FLAT_BLOCK)
        return rows

    def swiglu_backward(self, gate: Tensor, up: Tensor, d_hidden: Tensor) -> tuple[Fp8Matrix, Fp8Matrix, Fp8Matrix]:
        device, (tokens, features) = gate.device, gate.shape
        inputs = (gate, up, d_hidden)
        if self.granularity == "tensor":
            partials = _allocate_partial_maxima(device), _allocate_partial_maxima(device)
            numel = gate.numel()
            kernels.swiglu_backward_amax_kernel[(REDUCING_PROGRAMS,)](*inputs, *partials, numel, BLOCK=FLAT_BLOCK)
            hidden_scale, d_scale = (_find_scale(partial) for partial in partials)
            hidden = _allocate(features, tokens, device, hidden_scale)
            columns = _allocate(2 * features, tokens, device, d_scale)
            rows, tile = _allocate(tokens, 2 * features, device, d_scale), SWIGLU_BACKWARD_TENSOR_TILE
            targets = (hidden_scale, d_scale, hidden.data, rows.data, columns.data)
            grid = _grid(tokens, features, tile)
            kernels.swiglu_backward_tensor_kernel[grid](*inputs, *targets, tokens, features, **tile)
            return hidden, rows, columns
        # Two kernels are used because a 128 x 128 tile with three results does not fit into registers. `features` is a
        # multiple of 128.
        hidden, columns = (_allocate(width, tokens, device) for width in (features, 2 * features))
        rows = _allocate(tokens, 2 * features, device)
        by_rows, by_columns = (rows, SWIGLU_BACKWARD_ROWS_TILE), (columns, SWIGLU_BACKWARD_COLUMNS_TILE)
        for is_rows, (d, tile) in ((True, by_rows), (False, by_columns)):
            grid = _grid(tokens, features, tile)
            kernels.swiglu_backward_block_kernel[grid](*inputs, *hidden, *d, tokens, features, ROWS=is_rows, **tile)
        return hidden, rows, columns


def _grid(tokens: int, features: int, tile: dict[str, int]) -> tuple[int]:
    return (triton.cdiv(tokens, tile["BLOCK_TOKENS"]) * triton.cdiv(features, tile["BLOCK_FEATURES"]),)


def _allocate_partial_maxima(device: torch.device) -> Tensor:
    return torch.empty(REDUCING_PROGRAMS, dtype=torch.float32, device=device)


def _find_scale(partial_maxima: Tensor) -> Tensor:
    scale = torch.empty((), dtype=torch.float32, device=partial_maxima.device)
    kernels.scale_kernel[(1,)](partial_maxima, scale, COUNT=len(partial_maxima))
    return scale


def _allocate(rows: int, summed: int, device: torch.device, scale: Tensor | None = None) -> Fp8Matrix:
    """Return an uninitialized matrix with `scale`, or with one scale per 1 x 128 block."""
    data = torch.empty(rows, summed, dtype=FP8, device=device)
    if scale is None:
        scale = torch.empty(triton.cdiv(summed, BLOCK), rows, dtype=torch.float32, device=device)
    return Fp8Matrix(data, scale)


def _allocate_weight(rows: int, summed: int, device: torch.device) -> Fp8Matrix:
    padded = triton.cdiv(summed // BLOCK, SCALE_MULTIPLE) * SCALE_MULTIPLE
    data = torch.empty(rows, summed, dtype=FP8, device=device)
    return Fp8Matrix(data, torch.ones(rows // BLOCK, padded, dtype=torch.float32, device=device))


def _cast(
    x: Tensor, rows: bool, columns: bool, scale: Tensor | None = None, factors: tuple[Tensor, Tensor] | None = None
) -> list[Fp8Matrix]:
    """Return x with `scale` or with block scales; all matrices of a stack share `scale`. If `factors` are given, x is
    first multiplied by them: one per row and one per column."""
    *stack, group, features = x.shape
    tokens = x.numel() // features
    by_rows = _allocate(tokens, features, x.device, scale) if rows else None
    by_columns = _allocate(tokens // group * features, group, x.device, scale) if columns else None
    options = {"NORM": factors is not None, "ROWS": rows, "COLUMNS": columns, "SCALED": scale is not None}
    tile = CAST_BOTH_TILE if rows and columns else CAST_ROWS_TILE if rows else CAST_COLUMNS_TILE
    if scale is not None:
        tile = CAST_TENSOR_TILE
    inputs = (x, x if scale is None else scale, *(factors or (x, x)))
    targets = (*(by_rows or (x, x)), *(by_columns or (x, x)))
    kernels.cast_kernel[_grid(tokens, features, tile)](*inputs, *targets, tokens, features, group, **options, **tile)
    matrices = [matrix for matrix in (by_rows, by_columns) if matrix is not None]
    return [Fp8Matrix(data.view(*stack, -1, data.shape[1]), scale) for data, scale in matrices]
