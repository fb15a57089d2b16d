"""Each device's support for grouped GEMMs. Does not import torch.

The rules follow PyTorch 2.11 to 2.13 (aten/src/ATen/native/cuda/GroupedBlas.cpp) and quack-kernels 0.6.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from workloads.grouped_matmul import GroupedMatmulParameters


def unsupported_backend_reason(backend: str, architecture: str) -> str:
    """Return why a device does not support a backend; empty if it supports it."""
    if backend == "quack" and not re.match(r"sm(9|10|12)\d", architecture):
        return "for NVIDIA GPUs of compute capability 9.0, 10.x or 12.x only"
    return ""


def unsupported_reason(parameters: GroupedMatmulParameters, architecture: str) -> str:
    """Return the first reason why a device does not support the parameters; empty if it supports them."""
    if reason := unsupported_backend_reason(parameters.backend, architecture):
        return f"backend={parameters.backend} is {reason}"
    dtype, is_cpu = parameters.dtype, architecture.startswith("cpu")
    if parameters.backend == "quack" and dtype not in ("bf16", "fp16"):
        return f"backend=quack computes bf16 and fp16 here, not dtype={dtype}: set backend=torch"
    if dtype == "fp8_rowwise" and not re.match(r"sm90|gfx942|gfx950", architecture):  # as in PyTorch's own tests
        return "dtype=fp8_rowwise: PyTorch groups products with scales of rows on sm90, gfx942 and gfx950 alone"
    if dtype in ("fp32", "fp16") and parameters.backend == "torch" and not is_cpu:
        return f"dtype={dtype}: PyTorch's grouped kernels compute bf16; others run one product for each expert"
    unit = 16 if dtype == "fp8_rowwise" else 1 if is_cpu else 8
    for name, size in zip(("inputs", "outputs"), parameters.features, strict=True):
        if size % unit:
            return f"dtype={dtype} needs a layer's {name} in multiples of {unit}, not {size}"
    return ""
