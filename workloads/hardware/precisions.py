"""The data types of matrix products, and what their casts read and write."""

import tomllib
from dataclasses import dataclass
from pathlib import Path

from workloads.hardware.cluster import Device

SUSTAINED_SHARE = 0.7  # of a dense peak, where no rate was measured: an H200 sustains 0.70 in training


@dataclass(frozen=True)
class Precision:
    """A recipe of low-precision training. Output layer, attention, norms and optimizer stay in bf16 or fp32."""

    dtype: str  # of the products of the blocks
    cast_bytes: float = 0.0  # read and written for an element of an activation or gradient that a product takes
    weight_bytes: float = 0.0  # for a weight in each micro-batch
    instructions_gb_s: float = 15_000  # what the casts take beyond plain copies, for their instructions
    rate_share: float = 1.0  # of the rate of per-tensor scaled products
    gathered_bytes: int = 2  # of a weight, and of an activation before a tensor parallel product, that ranks gather
    multiple: int = 1  # of the tokens and sizes that torchao's layer supports


_ROWS = tomllib.loads(Path(__file__).with_name("precisions.toml").read_text())
PRECISIONS = {name: Precision(**row) for name, row in _ROWS.items()}


def peak_tflops(device: Device, precision: str) -> float | None:
    """Return the dense peak that an MFU is a share of; None without a source, or for a recipe that mixes data types."""
    dtype = PRECISIONS[precision].dtype
    return None if dtype in ("fp8", "fp4") else device.peak_tflops.get(dtype)


def sustained_flops(device: Device, dtype: str) -> float:
    """Return the FLOP/s of large products that a device sustains. Raises ValueError if it has no peak in the type."""
    names = [dtype, "bf16"] if dtype == "fp16" else [dtype]
    for name in names:
        if name in device.sustained_tflops:
            return device.sustained_tflops[name] * 1e12
    if dtype not in device.peak_tflops:
        raise ValueError(f"{device.name} has no matrix units for {dtype}")
    measured = {name: rate / device.peak_tflops[name] for name, rate in device.sustained_tflops.items()}
    return device.peak_tflops[dtype] * measured.get("bf16", SUSTAINED_SHARE) * 1e12
