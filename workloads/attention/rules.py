"""Each device's attention kernels and what the kernels support. Does not import torch.

The rules follow PyTorch 2.11 to 2.13 (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, torch/nn/attention/_fa4.py)
and the packages' own lists of GPUs. If a kernel rejects a shape for another reason, PyTorch reports the reason before
anything is timed (see `workloads.attention.run`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from workloads.tables import read_toml

if TYPE_CHECKING:
    from workloads.attention import AttentionParameters

KernelName = Literal[
    "flash", "cudnn", "efficient", "math", "flash4", "aotriton", "ck", "aotriton_efficient", "aiter", "flash_attn"
]


@dataclass(frozen=True)
class KernelRule:
    """The devices that support a kernel, and how to make PyTorch use it."""

    architectures: str  # a regular expression
    needs: str = ""  # the feature that other architectures lack
    dtypes: Sequence[str] = ("bf16", "fp16")  # data types supported on a GPU
    backend: str = ""  # back end of scaled_dot_product_attention; empty for packages that are called directly
    rocm_library: str = ""  # the library that PyTorch should prefer


_SM80 = r"sm(8\d|9\d|1\d\d)"  # sm80 and later
KERNELS: dict[str, KernelRule] = {name: KernelRule(**row) for name, row in read_toml(__file__, "kernels.toml").items()}


def unsupported_kernel_reason(kernel: str, architecture: str) -> str:
    """Return why a device lacks a kernel; empty if it has it. `workloads.api.recipes` defines `architecture`."""
    base = re.split(r"[ :]", architecture)[0]
    rule = KERNELS[kernel]
    return "" if re.fullmatch(rule.architectures, base) else f"for {rule.needs}; this device is {base}"


def unsupported_reason(parameters: AttentionParameters, architecture: str) -> str:
    """Return the reason a device does not support a combination of parameters; empty if the device supports it."""
    if reason := unsupported_kernel_reason(parameters.kernel, architecture):
        return f"kernel={parameters.kernel} is {reason}"
    rule = KERNELS[parameters.kernel]
    if architecture.startswith("cpu") or parameters.dtype in rule.dtypes:
        return ""
    return f"kernel={parameters.kernel} does not support dtype={parameters.dtype}: set one of {', '.join(rule.dtypes)}"


def matrix_dtype(parameters: AttentionParameters, architecture: str) -> str:
    """Return the matrix units' data type, which selects the peak for utilization. Its peak may be unknown.

    Since sm80, the memory-efficient kernel computes an fp32 product as three tf32 products (mem_eff_attention,
    gemm_kernel_utils.h: OpMultiplyAddFastF32).
    """
    is_split = parameters.kernel == "efficient" and parameters.dtype == "fp32" and re.match(_SM80, architecture)
    return "tf32x3" if is_split else parameters.dtype
