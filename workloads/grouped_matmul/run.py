"""Time one grouped product and check its result against products of single experts in fp64."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from workloads.api.contract import Infeasible, Measurement, Rank
from workloads.api.recipes import RECIPES, fp8_dtype, unsupported_rate_reason
from workloads.grouped_matmul import GroupedMatmulParameters, rules
from workloads.instruments import device as devices
from workloads.instruments.runs import measure_calls
from workloads.matmul.gemm import tolerance
from workloads.matmul.operands import TORCH_DTYPES, take_rows


@dataclass(frozen=True)
class GroupedOperands:
    """A is [rows, k], B [experts, k, n]; of a weight gradient A is [n, rows], B [rows, k], and C [experts, n, k]."""

    a: Tensor
    b: Tensor
    ends: Tensor  # int32, the row after each expert's last
    multiply: Callable[[], Tensor]

    @property
    def bytes(self) -> int:
        return self.a.nbytes + self.b.nbytes


def measure(parameters: GroupedMatmulParameters, rank: Rank) -> Measurement:
    """Time a grouped product on random operands; the time of every repeat is kept.

    Raises:
        Infeasible: the device, or what is installed, does not support the combination of parameters.
        ArithmeticError: the result is wrong.
    """
    device = devices.device_of(rank)
    architecture = devices.architecture(device)
    if reason := unsupported_rate_reason(parameters.dtype, architecture):
        raise Infeasible(f"dtype={parameters.dtype} is {reason}")
    if reason := rules.unsupported_reason(parameters, architecture):
        raise Infeasible(reason)
    generator = torch.Generator(device=device).manual_seed(parameters.seed)
    operands = make_operands(parameters, device, generator, architecture)
    started = time.perf_counter()
    c = operands.multiply()
    tuning_s = time.perf_counter() - started
    error = relative_error(operands, c)
    matrix_dtype = RECIPES[parameters.dtype].matrix_dtype
    if not error <= (limit := tolerance(matrix_dtype, architecture)):
        raise ArithmeticError(
            f"the grouped product in {parameters.dtype} is wrong: relative error {error:.2e}, more than {limit:.0e}"
        )
    measured = measure_calls(
        operands.multiply,
        lambda: make_operands(parameters, device, generator, architecture).multiply,
        operands.bytes,
        device,
        parameters,
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
    """Create normally distributed operands, in fp8 with scales of one, which a product's time does not depend on."""
    rows, experts, (inputs, outputs) = parameters.rows(), parameters.local_experts, parameters.features
    ends = torch.tensor(list(accumulate(rows)), dtype=torch.int32, device=device)
    total, is_fp8 = sum(rows), parameters.dtype == "fp8_rowwise"
    dtype = getattr(torch, fp8_dtype(architecture)) if is_fp8 else TORCH_DTYPES[parameters.dtype]

    def matrix(*size: int) -> Tensor:
        values = torch.randn(size, device=device, dtype=torch.bfloat16 if is_fp8 else dtype, generator=generator)
        return values.to(dtype)

    # fp8's units take operands whose summed dimension is contiguous: gradients have transposed ones.
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
        return GroupedOperands(a, b, ends, _scaled(a, b, ends, parameters))
    if parameters.backend == "quack":
        return GroupedOperands(a, b, ends, _quack(a, b, ends))
    return GroupedOperands(a, b, ends, lambda: functional.grouped_mm(a, b, offs=ends))


def _scaled(a: Tensor, b: Tensor, ends: Tensor, parameters: GroupedMatmulParameters) -> Callable[[], Tensor]:
    """A scale for each row of A and each column of an expert's B; of a weight gradient for each of its rows, too."""
    experts = len(ends)
    sizes = ((experts * a.shape[0],), (experts * b.shape[1],)) if b.dim() == 2 else (a.shape[:1], (experts, b.shape[2]))
    scale_a, scale_b = (torch.ones(size, device=a.device) for size in sizes)
    kind = functional.ScalingType.RowWise
    options: dict[str, Any] = {"offs": ends, "output_dtype": torch.bfloat16, "use_fast_accum": True}
    # PyTorch's type stubs lack it.
    return lambda: functional.scaled_grouped_mm(a, b, scale_a, kind, scale_b, kind, **options)  # type: ignore[attr-defined]


def _quack(a: Tensor, b: Tensor, ends: Tensor) -> Callable[[], Tensor]:
    try:
        from quack.gemm_interface import gemm
    except ImportError as error:
        raise Infeasible(f"backend=quack needs quack-kernels: pip install quack-kernels ({error})") from error
    starts = torch.cat([ends.new_zeros(1), ends])
    name = "cu_seqlens_m" if b.dim() == 3 else "cu_seqlens_k"
    return lambda: gemm(a, b, **{name: starts})


def relative_error(operands: GroupedOperands, c: Tensor, *, rows: int = 8, columns: int = 256) -> float:
    """Return ‖C - ref‖ / ‖ref‖ over evenly spaced rows and columns of up to eight experts, with ref in fp64."""
    a, b, bounds = operands.a, operands.b, list(pairwise([0, *operands.ends.tolist()]))
    busy = [expert for expert, (start, end) in enumerate(bounds) if end > start]
    difference = norm = 0.0
    for expert in busy[:: max(1, len(busy) // 8)]:
        start, end = bounds[expert]
        if b.dim() == 3:
            i, j = _spaced(start, end, rows, c), _spaced(0, b.shape[2], columns, c)
            exact = take_rows(a, i) @ take_rows(b[expert].t(), j).t()
            found = c[i][:, j]
        else:
            i, j = _spaced(0, a.shape[0], rows, c), _spaced(0, b.shape[1], columns, c)
            exact = take_rows(a, i)[:, start:end] @ take_rows(b.t(), j)[:, start:end].t()
            found = c[expert][i][:, j]
        difference += float((found.double() - exact).square().sum())
        norm += float(exact.square().sum())
    return (difference / norm) ** 0.5


def _spaced(start: int, end: int, count: int, like: Tensor) -> Tensor:
    return torch.linspace(start, end - 1, min(count, end - start), device=like.device).long()
