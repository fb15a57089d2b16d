"""Casts from bf16: how near each one comes to the memory's bandwidth."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from workloads import device as devices
from workloads.api.contract import Infeasible, Measurement, Rank
from workloads.api.recipes import fp8_dtype
from workloads.precision import CastParameters, formats
from workloads.telemetry import watching
from workloads.timing import time_in_turns

Cast = Callable[[torch.Tensor], tuple[torch.Tensor, ...]]


def measure(parameters: CastParameters, rank: Rank) -> Measurement:
    """Time the cast of a random bf16 matrix. The bytes counted are those that have to move: the matrix read once, and
    what the cast returns written once; a cast that reads twice is slower for it, as it should be."""
    formats.require_torchao()
    device = devices.of(rank)
    generator = torch.Generator(device=device).manual_seed(parameters.seed)
    matrix = torch.randn(parameters.rows, parameters.columns, device=device, dtype=torch.bfloat16, generator=generator)
    cast = _cast(parameters, devices.architecture(device))
    try:
        outputs = cast(matrix)
    except torch._dynamo.exc.Unsupported as error:
        raise Infeasible(f"torch.compile does not take torchao's cast: {str(error).splitlines()[0]}") from error
    with watching(device) as watch:
        (times_s,) = time_in_turns([lambda: cast(matrix)], device, warmup=parameters.warmup, repeats=parameters.repeats)
    moved = sum(t.numel() * t.element_size() for t in (matrix, *outputs))
    return Measurement(
        executed={name: getattr(parameters, name) for name in parameters.__dataclass_fields__}
        | {"rows": matrix.shape[0], "columns": matrix.shape[1], "repeats": len(times_s)},
        step_times_s=times_s,
        bytes_per_step=float(moved),
        metrics=watch.metrics(),
        machine_info=devices.machine_info(device),
    )


def _cast(parameters: CastParameters, architecture: str) -> Cast:
    """The function that was asked for. Raises Infeasible with the reason where torchao or the device has none."""
    ways = {"rows": ("rows",), "columns": ("columns",), "both": ("rows", "columns")}[parameters.direction]
    if parameters.implementation == "kernel":
        each = [_kernel(parameters.format, way, architecture) for way in ways]
    else:
        each = [_eager(parameters.format, way, architecture) for way in ways]

    def cast(matrix: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(output for one in each for output in one(matrix))

    if parameters.implementation != "compiled":
        return cast
    if architecture.startswith("sm") and int(architecture[2:]) < 89 and parameters.format != "mxfp4":
        raise Infeasible(f"Triton has no e4m3 before sm89, and this is {architecture}: implementation=eager runs")
    torch.compiler.reset()
    return torch.compile(cast, dynamic=False, fullgraph=True)


def _eager(name: str, way: str, architecture: str) -> Cast:
    """torchao's function of plain PyTorch operations for a format, with scales along the rows or the columns."""
    from torchao.float8 import ScalingGranularity
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
    from torchao.float8.float8_training_tensor import LinearMMConfig
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale
    from torchao.quantization import Float8Tensor
    from torchao.quantization.granularity import PerBlock

    fp8 = getattr(torch, fp8_dtype(architecture))
    along = -1 if way == "rows" else 0

    def fp8_tensorwise(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        low: Any = hp_tensor_to_float8_dynamic(x, fp8, LinearMMConfig())
        return low._data, low._scale

    def fp8_rowwise(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        low: Any = hp_tensor_to_float8_dynamic(
            x, fp8, LinearMMConfig(), scaling_granularity=ScalingGranularity.AXISWISE, axiswise_dim=along
        )
        return low._data, low._scale

    def fp8_blockwise(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        low: Any = Float8Tensor.from_hp(x, fp8, PerBlock([1, 128] if way == "rows" else [128, 1]))
        return low.qdata, low.scale

    def turned(x: torch.Tensor) -> torch.Tensor:
        return x if way == "rows" else x.t().contiguous()

    def mx(x: torch.Tensor, element: torch.dtype) -> tuple[torch.Tensor, ...]:
        return tuple(to_mx(turned(x), element, 32, ScaleCalculationMode.RCEIL))

    def nvfp4(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = turned(x)
        return tuple(nvfp4_quantize(x, 16, per_tensor_amax_to_scale(x.abs().max())))

    if name == "fp8_tensorwise" and way == "columns":
        raise Infeasible("one scale for the whole has no direction: direction=rows is it")
    return {
        "fp8_tensorwise": fp8_tensorwise,
        "fp8_rowwise": fp8_rowwise,
        "fp8_blockwise": fp8_blockwise,
        "mxfp8": lambda x: mx(x, torch.float8_e4m3fn),
        "mxfp4": lambda x: mx(x, torch.float4_e2m1fn_x2),
        "nvfp4": nvfp4,
    }[name]


def _kernel(name: str, way: str, architecture: str) -> Cast:
    """torchao's own kernel. Raises Infeasible where there is none for the format, or none for this device."""
    if not architecture.startswith(("sm", "gfx")):
        raise Infeasible("torchao's kernels are for GPUs: implementation=eager runs")
    if name in ("fp8_tensorwise", "mxfp4"):
        raise Infeasible(f"torchao has no kernel of its own for {name}: implementation=compiled runs")
    if name == "nvfp4":
        raise Infeasible("torchao's nvfp4 kernel is in the package mslk, and needs sm100: implementation=compiled runs")
    capability = int(architecture[2:]) if architecture.startswith("sm") else 0
    if name == "mxfp8":
        if capability < 100 and not architecture.startswith("gfx950"):
            raise Infeasible(f"torchao's mxfp8 kernels need sm100 or gfx950, and this is {architecture}")
        from torchao.prototype.mx_formats.kernels import triton_to_mxfp8_dim0, triton_to_mxfp8_dim1

        return triton_to_mxfp8_dim0 if way == "rows" else triton_to_mxfp8_dim1
    if capability < 89:
        raise Infeasible(f"torchao's fp8 kernels need sm89, and this is {architecture}")
    if name == "fp8_blockwise":
        from torchao.prototype.blockwise_fp8_training import kernels

        rows, columns = kernels.triton_fp8_blockwise_act_quant_lhs, kernels.triton_fp8_blockwise_act_quant_rhs
        return lambda x: (rows if way == "rows" else columns)(x, 128)
    from torchao.prototype.moe_training import kernels as moe

    if way == "rows":
        return lambda x: moe.triton_fp8_rowwise_2d_scale_and_cast(x, torch.float8_e4m3fn)
    return lambda x: moe.triton_fp8_per_group_colwise_scales(
        x, torch.tensor([len(x)], dtype=torch.int32, device=x.device), torch.float8_e4m3fn, False
    )
