"""Time one grouped GEMM, and check the result against fp64 GEMMs of single experts."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from workloads.api.contract import Infeasible, Measurement, Rank
from workloads.api.recipes import RECIPES, fp8_dtype
from workloads.grouped_matmul import GroupedMatmulParameters, rules
from workloads.instruments import products
from workloads.instruments.runs import check_error, measure_calls, prepare


@dataclass(frozen=True)
class GroupedOperands(products.Operands):
    """A[rows, k] and B[experts, k, n]. For a weight gradient, A[n, rows] and B[rows, k] give C[experts, n, k]."""

    ends: Tensor = field(kw_only=True)  # int32, the row after each expert's last row


def measure(parameters: GroupedMatmulParameters, rank: Rank) -> Measurement:
    """Time a grouped GEMM on random operands. The time of every repeat is kept.

    Raises Infeasible if the device or the installed packages do not support the combination of parameters, and
    ArithmeticError if the result is wrong.
    """
    device, architecture, generator = prepare(parameters, rank, rules.unsupported_reason)
    make = partial(make_operands, parameters, device, generator, architecture)
    operands = make()
    started = time.perf_counter()
    c = operands.multiply()
    tuning_s = time.perf_counter() - started
    matrix_dtype = RECIPES[parameters.dtype].matrix_dtype
    error, limit = relative_error(operands, c), products.tolerance(matrix_dtype, architecture)
    check_error(f"the grouped product in {parameters.dtype}", error, limit)
    measured = measure_calls(
        operands.multiply, lambda: make().multiply, operands.bytes, device, parameters, rank.clock_mhz
    )
    rows, (inputs, outputs) = parameters.rows(), parameters.features
    metrics = {"relative_error": error, "rows": float(sum(rows)), "experts_held": float(len(rows))}
    metrics |= {"executed_imbalance": max(rows) * len(rows) / sum(rows)}
    if parameters.backend == "quack":
        metrics["tuning_s"] = tuning_s
    return replace(
        measured,
        executed=vars(parameters) | {"repeats": len(measured.step_times_s), "seed": generator.initial_seed()},
        flops_per_step=2.0 * sum(rows) * inputs * outputs,
        matrix_dtype=matrix_dtype,
        metrics={**metrics, **measured.metrics},
    )


def make_operands(
    parameters: GroupedMatmulParameters, device: torch.device, generator: torch.Generator, architecture: str
) -> GroupedOperands:
    """Create normally distributed operands. All fp8 scales are 1, because scales do not affect a GEMM's time."""
    rows, experts, (inputs, outputs) = parameters.rows(), parameters.local_experts, parameters.features
    ends = torch.tensor(list(accumulate(rows)), dtype=torch.int32, device=device)
    total, is_fp8 = sum(rows), parameters.dtype == "fp8_rowwise"
    dtype = getattr(torch, fp8_dtype(architecture)) if is_fp8 else products.TORCH_DTYPES[parameters.dtype]

    def matrix(*size: int) -> Tensor:
        values = torch.randn(size, device=device, dtype=torch.bfloat16 if is_fp8 else dtype, generator=generator)
        return values.to(dtype)

    # fp8 matrix units need operands that are contiguous in the summed dimension, so gradients use transposed copies.
    if parameters.product == "forward":  # y = x · Wᵀ
        a, b = matrix(total, inputs), matrix(experts, outputs, inputs).mT
    elif parameters.product == "input_gradient":  # dx = dy · W
        a, b = (
            matrix(total, outputs),
            matrix(experts, inputs, outputs).mT if is_fp8 else matrix(experts, outputs, inputs),
        )
    else:  # dW = dyᵀ · x
        a = matrix(outputs, total) if is_fp8 else matrix(total, outputs).t()
        b = matrix(inputs, total).t() if is_fp8 else matrix(total, inputs)
    if is_fp8:
        return GroupedOperands(a, b, _scaled(a, b, ends, parameters), ends=ends)
    if parameters.backend == "quack":
        return GroupedOperands(a, b, _quack(a, b, ends), ends=ends)
    return GroupedOperands(a, b, lambda: functional.grouped_mm(a, b, offs=ends), ends=ends)


def _scaled(a: Tensor, b: Tensor, ends: Tensor, parameters: GroupedMatmulParameters) -> Callable[[], Tensor]:
    """Add a scale for each row of A and each column of an expert's B (for each expert's rows in a weight gradient)."""
    experts = len(ends)
    sizes = ((experts * a.shape[0],), (experts * b.shape[1],)) if b.dim() == 2 else (a.shape[:1], (experts, b.shape[2]))
    scale_a, scale_b = (torch.ones(size, device=a.device) for size in sizes)
    kind = functional.ScalingType.RowWise
    options: dict[str, Any] = {"offs": ends, "output_dtype": torch.bfloat16, "use_fast_accum": True}
    # PyTorch's type stubs lack this function.
    return lambda: functional.scaled_grouped_mm(a, b, scale_a, kind, scale_b, kind, **options)  # type: ignore[attr-defined]


def _quack(a: Tensor, b: Tensor, ends: Tensor) -> Callable[[], Tensor]:
    try:
        from quack.gemm_interface import gemm
    except ImportError as error:
        raise Infeasible(f"backend=quack needs quack-kernels: pip install quack-kernels ({error})") from error
    starts = torch.cat([ends.new_zeros(1), ends])
    name = "cu_seqlens_m" if b.dim() == 3 else "cu_seqlens_k"
    return lambda: gemm(a, b, **{name: starts})


def relative_error(operands: GroupedOperands, c: Tensor) -> float:
    """Return ‖C - A·B‖ / ‖A·B‖ over evenly spaced rows and columns of up to eight experts, with A·B in fp64."""
    a, b, bounds = operands.a, operands.b, list(pairwise([0, *operands.ends.tolist()]))
    busy = [(expert, slice(start, end)) for expert, (start, end) in enumerate(bounds) if end > start]
    return products.relative_error(
        *(
            (a[rows], b[expert], c[rows]) if b.dim() == 3 else (a[:, rows], b[rows], c[expert])
            for expert, rows in busy[:: max(1, len(busy) // 8)]
        )
    )
