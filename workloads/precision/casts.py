"""Measure the memory bandwidth that casts from bf16 achieve."""

from collections.abc import Callable
from typing import Any

import torch

from workloads.api.contract import Infeasible, Measurement, Rank
from workloads.api.recipes import fp8_dtype
from workloads.instruments import device as devices
from workloads.instruments.telemetry import monitor_gpu
from workloads.instruments.timing import event_metrics, time_in_turns
from workloads.instruments.torch_internals import compile_error
from workloads.precision import CastParameters, formats

Cast = Callable[[torch.Tensor], tuple[torch.Tensor, ...]]


def measure(parameters: CastParameters, rank: Rank) -> Measurement:
    """Time the cast of a random bf16 matrix.

    The bytes per step are the minimum: the matrix is read once and the cast's outputs are written once. A cast that
    reads the matrix twice therefore shows a lower bandwidth.

    Raises Infeasible if torchao is not installed or has no such cast for this device.
    """
    formats.require_torchao()
    device = devices.device_of(rank)
    architecture = devices.architecture(device)
    generator = torch.Generator(device=device).manual_seed(parameters.seed)
    matrix = torch.randn(parameters.rows, parameters.columns, device=device, dtype=torch.bfloat16, generator=generator)
    directions = ("rows", "columns") if parameters.direction == "both" else (parameters.direction,)
    build = _kernel_cast if parameters.implementation == "kernel" else _eager_cast
    casts = [build(parameters.format, direction, architecture) for direction in directions]

    def cast(matrix: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(output for cast_direction in casts for output in cast_direction(matrix))

    if parameters.implementation == "compiled":
        if architecture.startswith("sm") and int(architecture[2:]) < 89 and parameters.format != "mxfp4":
            raise Infeasible(
                f"implementation=compiled needs sm89 or later, where Triton has e4m3; this device is {architecture}. "
                "Set implementation=eager"
            )
        torch.compiler.reset()
        cast = torch.compile(cast, dynamic=False, fullgraph=True)
    try:
        outputs = cast(matrix)
    except compile_error() as error:
        raise Infeasible(
            f"torch.compile cannot compile torchao's cast to {parameters.format}: {str(error).splitlines()[0]}"
        ) from error
    with monitor_gpu(device) as watch:
        (times_s,) = time_in_turns([lambda: cast(matrix)], device, warmup=parameters.warmup, repeats=parameters.repeats)
    return Measurement(
        executed=vars(parameters) | {"rows": matrix.shape[0], "columns": matrix.shape[1], "repeats": len(times_s)},
        step_times_s=times_s,
        bytes_per_step=float(sum(tensor.nbytes for tensor in (matrix, *outputs))),
        metrics=watch.metrics() | event_metrics(device),
        machine_info=devices.machine_info(device),
    )


def _eager_cast(format_name: str, direction: str, architecture: str) -> Cast:
    if format_name.startswith("fp8"):
        return _eager_float8_cast(format_name, direction, getattr(torch, fp8_dtype(architecture)))
    # There is one scale per 16 (nvfp4) or 32 values.
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale

    element = torch.float8_e4m3fn if format_name == "mxfp8" else torch.float4_e2m1fn_x2

    def cast(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = x if direction == "rows" else x.t().contiguous()
        if format_name == "nvfp4":
            return tuple(nvfp4_quantize(x, 16, per_tensor_amax_to_scale(x.abs().max())))
        return tuple(to_mx(x, element, 32, ScaleCalculationMode.RCEIL))

    return cast


def _eager_float8_cast(format_name: str, direction: str, fp8: torch.dtype) -> Cast:
    """Return the cast with one scale per matrix, per row or column, or per 128 numbers of a row or column."""
    from torchao.float8 import ScalingGranularity
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
    from torchao.float8.float8_training_tensor import LinearMMConfig
    from torchao.quantization import Float8Tensor
    from torchao.quantization.granularity import PerBlock

    options: dict[str, Any] = {}
    block = PerBlock([1, 128] if direction == "rows" else [128, 1])
    if format_name == "fp8_rowwise":
        dimension = -1 if direction == "rows" else 0
        options = {"scaling_granularity": ScalingGranularity.AXISWISE, "axiswise_dim": dimension}
    elif format_name == "fp8_tensorwise" and direction == "columns":
        raise Infeasible("fp8_tensorwise has one scale for the whole matrix and no direction. Set direction=rows")

    def cast(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if format_name == "fp8_blockwise":
            blocks: Any = Float8Tensor.from_hp(x, fp8, block)
            return blocks.qdata, blocks.scale
        converted: Any = hp_tensor_to_float8_dynamic(x, fp8, LinearMMConfig(), **options)
        return converted._data, converted._scale

    return cast


def _kernel_cast(format_name: str, direction: str, architecture: str) -> Cast:
    if not architecture.startswith(("sm", "gfx")):
        raise Infeasible("implementation=kernel needs a GPU. Set implementation=eager")
    if format_name in ("fp8_tensorwise", "mxfp4"):
        raise Infeasible(f"torchao has no kernel of its own for {format_name}. Set implementation=compiled")
    if format_name == "nvfp4":
        raise Infeasible("torchao's nvfp4 kernel needs sm100 and the package mslk. Set implementation=compiled")
    capability = int(architecture[2:]) if architecture.startswith("sm") else 0
    if format_name == "mxfp8":
        if capability < 100 and not architecture.startswith("gfx950"):
            raise Infeasible(f"torchao's mxfp8 kernels need sm100 or gfx950; this device is {architecture}")
        from torchao.prototype.mx_formats.kernels import triton_to_mxfp8_dim0, triton_to_mxfp8_dim1

        return triton_to_mxfp8_dim0 if direction == "rows" else triton_to_mxfp8_dim1
    if capability < 89:
        raise Infeasible(f"torchao's fp8 kernels need sm89; this device is {architecture}")
    if format_name == "fp8_blockwise":
        from torchao.prototype.blockwise_fp8_training import kernels

        lhs, rhs = kernels.triton_fp8_blockwise_act_quant_lhs, kernels.triton_fp8_blockwise_act_quant_rhs
        return lambda x: (lhs if direction == "rows" else rhs)(x, 128)
    from torchao.prototype.moe_training import kernels as moe

    if direction == "rows":
        return lambda x: moe.triton_fp8_rowwise_2d_scale_and_cast(x, torch.float8_e4m3fn)
    return lambda x: moe.triton_fp8_per_group_colwise_scales(
        x, torch.tensor([len(x)], dtype=torch.int32, device=x.device), torch.float8_e4m3fn, False
    )
