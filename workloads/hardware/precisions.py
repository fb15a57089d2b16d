"""GEMM data types, and the bytes that casts to these types read and write."""

from dataclasses import dataclass

from workloads.hardware.cluster import Device
from workloads.tables import read_toml

SUSTAINED_SHARE = 0.7  # share of the dense peak, if no rate was measured: an H200 sustains 0.70 in training


@dataclass(frozen=True)
class Precision:
    """A recipe for low-precision training. The output layer, attention, norms and optimizer stay in bf16 or fp32."""

    dtype: str  # data type of the GEMMs in blocks
    cast_bytes: float = 0.0  # bytes read and written per activation or gradient element that a GEMM reads
    weight_bytes: float = 0.0  # bytes read and written per weight in each micro-batch
    instructions_gb_s: float = 15_000  # rate of the casts' instructions; their time adds to the time of plain copies
    rate_share: float = 1.0  # rate relative to per-tensor scaled GEMMs
    gathered_bytes: int = 2  # bytes per gathered weight, and per activation gathered before a tensor-parallel GEMM
    multiple: int = 1  # tokens and sizes must be multiples of this in torchao's layer


_ROWS = read_toml(__file__, "precisions.toml")
PRECISIONS = {name: Precision(**row) for name, row in _ROWS.items()}


def peak_tflops(device: Device, precision: str) -> float | None:
    """Return the dense peak for the MFU; None if no source has it, or if the recipe mixes data types."""
    dtype = PRECISIONS[precision].dtype
    return None if dtype in ("fp8", "fp4") else device.peak_tflops.get(dtype)


def sustained_flops(device: Device, dtype: str) -> float:
    """Return the sustained FLOP/s of large GEMMs. Raises ValueError if the device has no peak in this data type."""
    names = [dtype, "bf16"] if dtype == "fp16" else [dtype]
    for name in names:
        if name in device.sustained_tflops:
            return device.sustained_tflops[name] * 1e12
    if dtype not in device.peak_tflops:
        raise ValueError(f"{device.name} has no matrix units for {dtype}")
    measured = {name: rate / device.peak_tflops[name] for name, rate in device.sustained_tflops.items()}
    return device.peak_tflops[dtype] * measured.get("bf16", SUSTAINED_SHARE) * 1e12
