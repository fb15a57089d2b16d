"""The data types of matrix products, and what their casts read and write."""

from __future__ import annotations

from dataclasses import dataclass

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


# A cast with a scale of its own tensor reads bf16 twice and writes fp8 by rows and by columns; with the scale of the
# step before it reads once. On an H200 compiled casts reach 2,000 to 2,300 GB/s, of a copy's 4,080, and written kernels
# 3,400 to 3,600 (benchmarks/results/precision_h200.md): the rest is instructions.
PRECISIONS = {
    "bf16": Precision("bf16"),
    "fp16": Precision("fp16"),
    "fp32": Precision("fp32", gathered_bytes=4),
    "bf16_amp": Precision("bf16"),
    "fp16_amp": Precision("fp16"),
    # torchtitan gathers in fp8 (enable_fsdp_float8_all_gather, Float8ColwiseParallel), Transformer Engine too.
    "fp8_tensorwise": Precision("fp8", 6, 12, 4_600, gathered_bytes=1, multiple=16),
    "fp8_rowwise": Precision("fp8", 10, 20, 4_600, multiple=16),
    "fp8_rowwise_gw_hp": Precision("fp8", 6, 12, 4_600, 0.87, multiple=16),
    "fp8_blockwise": Precision("fp8", 8, 12, 25_000, 0.78, multiple=128),
    "fp8_te_delayed": Precision("fp8", 4, 0, gathered_bytes=1),
    "fp8_te_current": Precision("fp8", 6, 2, gathered_bytes=1),
    "fp8_te_blockwise": Precision("fp8", 4, 2, 15_000, 0.85),
    "fp8_te_mxfp8": Precision("fp8", 4, 2),
    "mxfp8": Precision("fp8", 4, 8, multiple=32),
    "nvfp4": Precision("fp4", 6, 3, multiple=128),
}


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
