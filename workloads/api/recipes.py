"""Number formats of matrix products, and each device's support for them. No torch: the driver checks before it starts.

A device is identified by its architecture: `sm90` (NVIDIA's compute capability), `gfx942` (AMD's), or `cpu` with the
number formats that it has instructions for (`cpu bf16`). The rules are those of PyTorch 2.11 to 2.13: a format that
the hardware has and PyTorch has no kernel for is not native here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

FROM_HERE_ON = 10_000


class Support(StrEnum):
    NATIVE = "native"  # the matrix units take it
    EMULATED = "emulated"  # converted to another format before the product: the same numerics, without the speed
    UNSUPPORTED = "unsupported"


@dataclass(frozen=True)
class Recipe:
    matrix_dtype: str  # the type whose peak a utilization refers to
    needs: str  # what a device without native support lacks
    sm: tuple[int, int] | None  # first and last compute capability whose matrix units take it; None for no NVIDIA GPU
    gfx: tuple[str, ...]  # the AMD architectures whose matrix units take it
    cpu: str | None = None  # the format that a processor needs instructions for; empty for none, None if none takes it
    numerics: bool = True  # torchao can emulate it on any device


_CDNA3, _CDNA4 = ("gfx942",), ("gfx950",)
_CDNA = ("gfx908", "gfx90a", *_CDNA3, *_CDNA4)
_FP8 = "fp8 matrix units (sm89, gfx942 or later)"

# Per-row scales: ATen's RowwiseScaledMM.cu (sm89 to sm12x). 1x128 and 128x128 blocks: cuBLASLt on sm90 alone.
# mx formats: cuBLASLt from sm100, hipBLASLt on gfx950. PyTorch multiplies mxfp4 on gfx950 alone, nvfp4 from sm100.
RECIPES = {
    "fp32": Recipe("fp32", "fp32 arithmetic", (0, FROM_HERE_ON), _CDNA, cpu=""),
    "tf32": Recipe("tf32", "tf32 matrix units (sm80 or later, gfx942)", (80, FROM_HERE_ON), _CDNA3, numerics=False),
    "fp16": Recipe("fp16", "fp16 matrix units", (70, FROM_HERE_ON), _CDNA, cpu="fp16"),
    "bf16": Recipe("bf16", "bf16 matrix units (sm80, gfx90a or later)", (80, FROM_HERE_ON), _CDNA[1:], cpu="bf16"),
    "fp8_tensorwise": Recipe("fp8", _FP8, (89, FROM_HERE_ON), (*_CDNA3, *_CDNA4)),
    "fp8_rowwise": Recipe("fp8", _FP8, (89, FROM_HERE_ON), (*_CDNA3, *_CDNA4)),
    "fp8_blockwise": Recipe("fp8", "1x128 and 128x128 scales, which cuBLASLt takes on sm90 alone", (90, 90), ()),
    "mxfp8": Recipe("fp8", "units with a scale for each 32 (sm100, gfx950 or later)", (100, FROM_HERE_ON), _CDNA4),
    "mxfp4": Recipe("fp4", "a kernel for it in PyTorch, which has one on gfx950 alone", None, _CDNA4),
    "nvfp4": Recipe("fp4", "fp4 matrix units of NVIDIA (sm100 or later)", (100, FROM_HERE_ON), ()),
}

# m, n and k must be multiples of these numbers: the units load whole rows of 16 bytes and whole blocks of scales.
MULTIPLES = {
    "fp8_tensorwise": (1, 16, 16),
    "fp8_rowwise": (1, 16, 16),
    "fp8_blockwise": (1, 128, 128),
    "mxfp8": (16, 16, 32),
    "mxfp4": (16, 16, 32),
    "nvfp4": (16, 16, 32),
}
# gfx950: every dimension of both operands in memory in multiples of 32, where two numbers of 4 bits share a byte along
# k (ATen's ScaledBlas.cpp, _scaled_mxfp8_mxfp8 and _scaled_mxfp4_mxfp4).
MULTIPLES_GFX950 = {"mxfp8": (32, 32, 32), "mxfp4": (32, 32, 64)}
# The output types of formats with scales on ROCm; bf16 if none is requested (ScaledBlas.cpp, the same functions and
# _scaled_rowwise_rowwise).
OUTPUTS_ROCM = {"fp8_rowwise": ("bf16",), "mxfp8": ("bf16", "fp16"), "mxfp4": ("bf16", "fp16")}
# The first ROCm whose hipBLASLt multiplies a format (ScaledBlas.cpp, ROCM_VERSION).
FIRST_ROCM = {"mxfp8": (7, 0), "mxfp4": (7, 0)}


def unsupported_shape_reason(recipe: str, m: int, n: int, k: int, architecture: str) -> str:
    """Return why a recipe of `MULTIPLES` does not support a product of this shape; empty if it does."""
    multiples = MULTIPLES | (MULTIPLES_GFX950 if architecture.startswith("gfx950") else {})
    for name, size, multiple in zip("mnk", (m, n, k), multiples[recipe], strict=True):
        if size % multiple:
            return f"{recipe} needs {name} in multiples of {multiple}, not {size}"
    return ""


def unsupported_output_reason(recipe: str, output_dtype: str, architecture: str) -> str:
    """Return why a device does not support an output type for a recipe; empty if it does. `auto` fits every device."""
    allowed = OUTPUTS_ROCM.get(recipe, ()) if architecture.startswith("gfx") else ()
    if not allowed or output_dtype in ("auto", *allowed):
        return ""
    return f"output_dtype={output_dtype}: on ROCm {recipe} gives {' or '.join(allowed)} only"


def unsupported_rocm_reason(recipe: str, rocm: str) -> str:
    """Return why a version of ROCm, such as 7.2.1, does not support a recipe; empty if it does, or without ROCm."""
    first = FIRST_ROCM.get(recipe, (0, 0))
    if not rocm or rocm_version(rocm) >= first:
        return ""
    return f"{recipe} needs ROCm {'.'.join(map(str, first))} or later; this PyTorch was built with {rocm}"


def rocm_version(rocm: str) -> tuple[int, int]:
    """Return major and minor of a version such as 7.2.26015-fc0010cf6a."""
    major, minor = rocm.split(".")[:2]
    return int(major), int(minor)


def support(recipe: str, architecture: str) -> tuple[Support, str]:
    """Return a device's support for a recipe, and why it is not native; the reason is empty if it is.

    Raises KeyError for an unknown recipe, ValueError for an unknown architecture.
    """
    requested = RECIPES[recipe]
    kind, *instructions = architecture.split()
    if kind == "cpu":
        is_native = requested.cpu is not None and requested.cpu in ("", *instructions)
    elif match := re.fullmatch(r"sm(\d+)", kind):
        is_native = requested.sm is not None and requested.sm[0] <= int(match[1]) <= requested.sm[1]
    elif kind.startswith("gfx"):
        is_native = kind.split(":")[0] in requested.gfx  # the driver adds features: gfx942:sramecc+:xnack-
    else:
        raise ValueError(f"unknown architecture {architecture!r}: it must have the form of sm90, gfx942 or cpu")
    if is_native:
        return Support.NATIVE, ""
    level = Support.EMULATED if requested.numerics else Support.UNSUPPORTED
    return level, f"{architecture.split()[0]} lacks {requested.needs}"


def is_architecture(text: str) -> bool:
    return bool(re.match(r"(cpu|sm\d+|gfx\S+)( |$)", text))


def unsupported_rate_reason(recipe: str, architecture: str) -> str:
    """Return why a rate in this format is not measured on this device; empty if the format is native."""
    level, reason = support(recipe, architecture)
    return "" if level is Support.NATIVE else f"{level.value} on this device: {reason}"


def unsupported_block_rate_reason(recipe: str, architecture: str) -> str:
    """Return why a block with a manual backward pass does not train in this format, as what follows "it is"."""
    if reason := unsupported_rate_reason(recipe, architecture):
        return reason
    if recipe in MULTIPLES and architecture.startswith("gfx"):
        return "not for AMD's GPUs: this block's casts are Triton kernels that were written for NVIDIA's"
    return ""


def fp8_dtype(architecture: str) -> str:
    """Return torch's name of the 8-bit type with 3 bits of mantissa; gfx94x has its own, without a negative zero."""
    return "float8_e4m3fnuz" if architecture.startswith("gfx94") else "float8_e4m3fn"
