"""Number formats of matrix products, and what a device can do with each. No torch: the driver asks before it starts.

A device is known by its architecture: `sm90` (NVIDIA's compute capability), `gfx942` (AMD's), or `cpu` with the
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
    EMULATED = "emulated"  # converted to another format before the product: its numerics, and never its speed
    UNSUPPORTED = "unsupported"


@dataclass(frozen=True)
class Recipe:
    """One format with its scales.

    matrix_dtype   the type whose peak a utilisation is of
    sm             first and last compute capability whose matrix units take it
    gfx            the AMD architectures whose matrix units take it
    cpu            the instruction that a processor needs for it; "" is none, None is never
    numerics       whether torchao can imitate it anywhere
    needs          what a device without it lacks
    """

    matrix_dtype: str
    needs: str
    sm: tuple[int, int] | None
    gfx: tuple[str, ...]
    cpu: str | None = None
    numerics: bool = True


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


# What m, n and k have to be multiples of, beside 1: the units load whole rows of 16 bytes, and whole blocks of scales.
MULTIPLES = {
    "fp8_tensorwise": (1, 16, 16),
    "fp8_rowwise": (1, 16, 16),
    "fp8_blockwise": (1, 128, 128),
    "mxfp8": (16, 16, 32),
    "mxfp4": (16, 16, 32),
    "nvfp4": (16, 16, 32),
}


def unfit(recipe: str, m: int, n: int, k: int) -> str:
    """Why a product of this shape cannot be had in a recipe of `MULTIPLES`; empty where it can."""
    for name, size, multiple in zip("mnk", (m, n, k), MULTIPLES[recipe], strict=True):
        if size % multiple:
            return f"{recipe} needs {name} in multiples of {multiple}, not {size}"
    return ""


def support(recipe: str, architecture: str) -> tuple[Support, str]:
    """What a device of this architecture can do with a recipe, and why not more; the reason is empty where native.

    Raises KeyError for a recipe that is not in `RECIPES`, ValueError for what is no architecture.
    """
    wanted = RECIPES[recipe]
    if _is_native(wanted, architecture):
        return Support.NATIVE, ""
    state = Support.EMULATED if wanted.numerics else Support.UNSUPPORTED
    return state, f"{architecture.split()[0]} lacks {wanted.needs}"


def _is_native(recipe: Recipe, architecture: str) -> bool:
    kind, *instructions = architecture.split()
    if kind == "cpu":
        return recipe.cpu is not None and recipe.cpu in ("", *instructions)
    if found := re.fullmatch(r"sm(\d+)", kind):
        return recipe.sm is not None and recipe.sm[0] <= int(found[1]) <= recipe.sm[1]
    if kind.startswith("gfx"):
        return kind.split(":")[0] in recipe.gfx  # the driver adds features: gfx942:sramecc+:xnack-
    raise ValueError(f"{architecture!r} is no architecture: sm90, gfx942 and cpu are")


def unsupported_rate_reason(recipe: str, architecture: str) -> str:
    """Why a product in this format has no speed worth searching for on this device; empty where it has."""
    state, reason = support(recipe, architecture)
    return "" if state is Support.NATIVE else f"{state.value} on this device: {reason}"


def fp8_dtype(architecture: str) -> str:
    """The name in torch of the 8-bit type with 3 bits of mantissa: gfx94x has its own, without a negative zero."""
    return "float8_e4m3fnuz" if architecture.startswith("gfx94") else "float8_e4m3fn"
