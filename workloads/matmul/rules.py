"""The GEMM parameters that PyTorch rejects or silently ignores, by device. Does not import torch.

A parameter that has no effect must not be recorded as executed, so every such combination is infeasible, with a reason.
The rules match PyTorch 2.11 to 2.13; the cited source files are in aten/src/ATen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from workloads.api.recipes import RECIPES, unsupported_output_reason, unsupported_shape_reason
from workloads.tables import read_toml

if TYPE_CHECKING:
    from workloads.matmul import MatmulParameters

# Backends that call torch.mm: PyTorch's default library, a selected library, or a search over two libraries.
LIBRARY_BACKENDS = ("torch", "cublas", "cublaslt", "ck", "tunable")
# From Context.cpp, Context::ckSupported.
CK_ARCHITECTURES = ("gfx90a", "gfx942", "gfx950")
# Data types whose partial sums may be rounded: by PyTorch's switches for 16-bit types, and fp8's fast accumulators.
REDUCIBLE = ("bf16", "fp16", "fp8_tensorwise", "fp8_rowwise")
# Formats with scales that TunableOp dispatches (native/cuda/ScaledBlas.cpp, _tunable_scaled_gemm_rocm). TunableOp has
# no branch for 4-bit types, which would run no kernel at all.
TUNABLE_SCALED = ("fp8_tensorwise", "fp8_rowwise")
UNPROMISED: dict[str, str] = read_toml(__file__, "unpromised.toml")


def unsupported_backend_reason(backend: str, architecture: str) -> str:
    """Return why a device does not support a backend; empty if it does."""
    if architecture.startswith("cpu"):
        return "" if backend == "torch" else "for GPUs only"
    # The driver adds features to an architecture: gfx942:sramecc+:xnack-.
    if backend == "ck" and architecture.partition(":")[0] not in CK_ARCHITECTURES:
        return f"for {', '.join(CK_ARCHITECTURES)} only: PyTorch has products by Composable Kernel there"
    if backend == "tunable" and not _is_rocm(architecture):
        return "for AMD GPUs only: elsewhere TunableOp knows the default kernel alone (torch.cuda.tunable)"
    return ""


def unsupported_accumulation_reason(accumulation: str, architecture: str) -> str:
    """Return why a device does not support an accumulation; empty if it does.

    On ROCm, cuda/CUDABlas.cpp passes neither the switches of the 16-bit types nor the fast accumulation of fp8 to
    hipBLAS or hipBLASLt (`#ifndef USE_ROCM`); both accumulate in fp32.
    """
    if accumulation != "reduced" or architecture.startswith("sm"):
        return ""
    return "without effect on ROCm, where products sum in fp32" if _is_rocm(architecture) else "for NVIDIA GPUs only"


def executed_accumulation(parameters: MatmulParameters, architecture: str) -> str:
    """Return the accumulation, with `auto` resolved to PyTorch's default on this device."""
    if parameters.accumulation != "auto":
        return parameters.accumulation
    reason = unsupported_accumulation_reason("reduced", architecture) or _unreducible_reason(parameters)
    return "fp32" if reason else "reduced"


def unsupported_reason(parameters: MatmulParameters, architecture: str) -> str:
    """Return the first reason why a device does not support a combination of parameters; empty if it does."""
    backend, dtype = parameters.backend, parameters.dtype
    if reason := unsupported_backend_reason(backend, architecture):
        return f"backend={backend} is {reason}"
    if reason := unsupported_accumulation_reason(parameters.accumulation, architecture):
        return f"accumulation={parameters.accumulation} is {reason}"
    if reason := unsupported_output_reason(dtype, parameters.output_dtype, architecture):
        return reason
    if RECIPES[dtype].is_scaled:
        if backend != "torch" and not (backend == "tunable" and dtype in TUNABLE_SCALED):
            return f"backend={backend} does not support dtype={dtype}: set backend=torch"
        shape = parameters.shape()
        if shape.layout != "nt":
            return f"dtype={dtype} supports layout=nt only, not layout={shape.layout}"
        if reason := unsupported_shape_reason(dtype, shape.m, shape.n, shape.k, architecture):
            return reason
    if backend == "triton" and parameters.output_dtype not in ("auto", dtype):
        return f"backend={backend} computes {dtype}, not output_dtype={parameters.output_dtype}"
    if parameters.accumulation == "reduced" and (reason := _unreducible_reason(parameters)):
        return reason
    if not _is_rocm(architecture):
        return ""
    # Only hipBLASLt has tf32; the other paths call hipblasSgemm or CK in fp32.
    if dtype == "tf32" and backend in ("cublas", "ck"):
        return f"backend={backend} computes fp32 on ROCm, not tf32; set backend=cublaslt"
    if backend in UNPROMISED and sums_into_fp32_output(parameters):
        return f"backend={backend}: {UNPROMISED[backend]} for output_dtype=fp32 of {dtype} on ROCm; set backend=cublas"
    return ""


def sums_into_fp32_output(parameters: MatmulParameters) -> bool:
    """Return whether 16-bit operands give an fp32 result, for which PyTorch uses a different function."""
    return parameters.dtype in ("bf16", "fp16") and parameters.output_dtype == "fp32"


def _unreducible_reason(parameters: MatmulParameters) -> str:
    if parameters.dtype not in REDUCIBLE:
        return f"accumulation=reduced does not exist for dtype={parameters.dtype}; set accumulation=auto"
    if parameters.backend not in LIBRARY_BACKENDS:
        return f"accumulation=reduced: kernels of backend={parameters.backend} sum in fp32; set accumulation=auto"
    return ""


def _is_rocm(architecture: str) -> bool:
    return architecture.startswith("gfx")
