"""What kernels of attention there are on a device, and what they compute. No torch.

The rules are those of PyTorch 2.11 to 2.13 (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp,
torch/nn/attention/_fa4.py) and of the packages' own lists of GPUs. What else a kernel refuses of a shape PyTorch says
before anything is timed, see `workloads.attention.run`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from workloads.attention import AttentionParameters

KernelName = Literal[
    "flash", "cudnn", "efficient", "math", "flash4", "aotriton", "ck", "aotriton_efficient", "aiter", "flash_attn"
]
HALF_PRECISION = ("bf16", "fp16")
ANY_TYPE = (*HALF_PRECISION, "fp32")


@dataclass(frozen=True)
class KernelRule:
    """Where a kernel exists, and how PyTorch is made to run it."""

    architectures: str  # a regular expression of them
    needs: str  # what others lack
    dtypes: tuple[str, ...] = HALF_PRECISION  # that it computes on a GPU
    backend: str = ""  # of scaled_dot_product_attention; empty for a package that is called by itself
    rocm_library: str = ""  # that PyTorch is to prefer


# FlashAttention 4 checks for compute capability 9.x or 10.x (_fa4.py). On ROCm `flash` and `efficient` would be
# AOTriton's or CK's kernels, by a setting of the process: there the kernels are named by their library.
_FLASH, _EFFICIENT = "FLASH_ATTENTION", "EFFICIENT_ATTENTION"
_SM80 = r"sm(8\d|9\d|1\d\d)"
KERNELS: dict[str, KernelRule] = {
    "flash": KernelRule(
        rf"cpu|{_SM80}", "a CPU, or an NVIDIA GPU (sm80 or later); AMD GPUs have aotriton and ck", backend=_FLASH
    ),
    "cudnn": KernelRule(_SM80, "an NVIDIA GPU (sm80 or later)", backend="CUDNN_ATTENTION"),
    "efficient": KernelRule(r"sm\d+", "an NVIDIA GPU; AMD GPUs have aotriton_efficient", ANY_TYPE, _EFFICIENT),
    "math": KernelRule(r".*", "", ANY_TYPE, "MATH"),
    "flash4": KernelRule(r"sm(9\d|10\d)", "compute capability 9.x or 10.x", backend=_FLASH),
    "aotriton": KernelRule(r"gfx\w+", "an AMD GPU", HALF_PRECISION, _FLASH, "aotriton"),
    "ck": KernelRule(r"gfx(90a|942|950)", "gfx90a, gfx942 or gfx950", HALF_PRECISION, _FLASH, "ck"),
    "aotriton_efficient": KernelRule(r"gfx\w+", "an AMD GPU", ANY_TYPE, _EFFICIENT, "aotriton"),
    "aiter": KernelRule(r"gfx(942|950)", "gfx942 or gfx950"),
    "flash_attn": KernelRule(r"gfx(90a|942|950)", "gfx90a, gfx942 or gfx950"),
}


def unsupported_kernel_reason(kernel: str, architecture: str) -> str:
    """Return why a device has no such kernel; empty if it has. `architecture` is as in `workloads.api.recipes`."""
    base = re.split(r"[ :]", architecture)[0]
    rule = KERNELS[kernel]
    return "" if re.fullmatch(rule.architectures, base) else f"for {rule.needs}; this device is {base}"


def unsupported_reason(parameters: AttentionParameters, architecture: str) -> str:
    """Return why a device does not support a combination of parameters; empty if it does."""
    if reason := unsupported_kernel_reason(parameters.kernel, architecture):
        return f"kernel={parameters.kernel} is {reason}"
    rule = KERNELS[parameters.kernel]
    if architecture.startswith("cpu") or parameters.dtype in rule.dtypes:
        return ""
    return f"kernel={parameters.kernel} does not support dtype={parameters.dtype}: set one of {', '.join(rule.dtypes)}"


def matrix_dtype(parameters: AttentionParameters, architecture: str) -> str:
    """Return the matrix units' type, whose peak a utilization refers to; one without a peak if there is none.

    The memory-efficient kernel computes an fp32 product as three of tf32 from sm80 on (mem_eff_attention,
    gemm_kernel_utils.h: OpMultiplyAddFastF32).
    """
    is_split = parameters.kernel == "efficient" and parameters.dtype == "fp32" and re.match(_SM80, architecture)
    return "tf32x3" if is_split else parameters.dtype
