"""GEMM number formats, and each device's support for them. The driver checks this before a sweep, without torch.

A device is identified by its architecture: `sm90` (NVIDIA's compute capability), `gfx942` (AMD), or `cpu` with the
number formats that the CPU has instructions for (`cpu bf16`). The rules follow PyTorch 2.11 to 2.13: a format that the
hardware supports is not native if PyTorch has no kernel for it.
"""

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from workloads.tables import read_toml


class Support(StrEnum):
    NATIVE = "native"  # the matrix units support the format
    EMULATED = "emulated"  # operands are converted to another format before the GEMM: same numerics, without the speed
    UNSUPPORTED = "unsupported"


@dataclass(frozen=True)
class Recipe:
    matrix_dtype: str  # the data type with the peak rate that utilization refers to
    needs: str  # the feature that a device without native support lacks
    # The first and last compute capability with matrix-unit support; the first is None if no NVIDIA GPU has support.
    first_sm: int | None = None
    last_sm: int = 10_000
    gfx: tuple[str, ...] = ()  # AMD architectures with matrix-unit support
    cpu: str | None = None  # format that needs CPU instructions; empty if none needed, None if CPUs lack the recipe
    numerics: bool = True  # torchao can emulate the format on any device
    # m, n and k must be multiples of these, because matrix units load whole 16-byte rows and whole blocks of scales.
    multiples: tuple[int, int, int] = (1, 1, 1)
    multiples_gfx950: tuple[int, int, int] | None = None  # None if the same as elsewhere
    outputs_rocm: tuple[str, ...] = ()  # the output types on ROCm, bf16 if none is requested; empty for any
    first_rocm: tuple[int, int] = (0, 0)  # the first ROCm release in which hipBLASLt supports the recipe

    @property
    def is_scaled(self) -> bool:
        return self.matrix_dtype in ("fp8", "fp4")


_ROWS: dict[str, dict[str, Any]] = read_toml(__file__, "recipes.toml")
_TUPLES = ("gfx", "multiples", "multiples_gfx950", "outputs_rocm", "first_rocm")
RECIPES = {name: Recipe(**row | {key: tuple(row[key]) for key in _TUPLES if key in row}) for name, row in _ROWS.items()}


def unsupported_shape_reason(recipe: str, m: int, n: int, k: int, architecture: str) -> str:
    """Return why a recipe does not support a GEMM of this shape; empty if it supports the shape."""
    multiples = RECIPES[recipe].multiples
    if architecture.startswith("gfx950"):
        multiples = RECIPES[recipe].multiples_gfx950 or multiples
    for name, size, multiple in zip("mnk", (m, n, k), multiples, strict=True):
        if size % multiple:
            return f"{recipe} needs {name} in multiples of {multiple}, not {size}"
    return ""


def unsupported_output_reason(recipe: str, output_dtype: str, architecture: str) -> str:
    """Return why a device does not support a recipe's output type; empty if it does. `auto` is always allowed."""
    allowed = RECIPES[recipe].outputs_rocm if architecture.startswith("gfx") else ()
    if not allowed or output_dtype in ("auto", *allowed):
        return ""
    return f"output_dtype={output_dtype}: on ROCm {recipe} gives {' or '.join(allowed)} only"


def unsupported_rocm_reason(recipe: str, rocm: str) -> str:
    """Return why a ROCm version, such as 7.2.1, does not support a recipe; empty if it does or `rocm` is empty."""
    first = RECIPES[recipe].first_rocm
    if not rocm or rocm_version(rocm) >= first:
        return ""
    return f"{recipe} needs ROCm {'.'.join(map(str, first))} or later; this PyTorch was built with {rocm}"


def rocm_version(rocm: str) -> tuple[int, int]:
    """Return the major and minor numbers of a version such as 7.2.26015-fc0010cf6a."""
    major, minor = rocm.split(".")[:2]
    return int(major), int(minor)


def support(recipe: str, architecture: str) -> tuple[Support, str]:
    """Return a device's support for a recipe, and the reason, which is empty if the support is native.

    Raises KeyError for an unknown recipe and ValueError for an unknown architecture.
    """
    requested = RECIPES[recipe]
    kind, *instructions = architecture.split()
    if kind == "cpu":
        is_native = requested.cpu is not None and requested.cpu in ("", *instructions)
    elif match := re.fullmatch(r"sm(\d+)", kind):
        is_native = requested.first_sm is not None and requested.first_sm <= int(match[1]) <= requested.last_sm
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
    """Return the reason a rate in this format is not measured on this device; empty if the format is native."""
    level, reason = support(recipe, architecture)
    return "" if level is Support.NATIVE else f"{level.value} on this device: {reason}"


def unsupported_block_rate_reason(recipe: str, architecture: str) -> str:
    """Return why a block with a manual backward pass cannot train in this format, phrased to follow "it is"."""
    if reason := unsupported_rate_reason(recipe, architecture):
        return reason
    if RECIPES[recipe].is_scaled and architecture.startswith("gfx"):
        return "not for AMD's GPUs: this block's casts are Triton kernels that were written for NVIDIA's"
    return ""


def fp8_dtype(architecture: str) -> str:
    """Return torch's name for the 8-bit type with 3 mantissa bits. gfx94x has its own type, without a negative zero."""
    return "float8_e4m3fnuz" if architecture.startswith("gfx94") else "float8_e4m3fn"
