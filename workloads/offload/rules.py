"""Which data types a device trains in, and with which sequences. No torch: a plan shows it before anything starts."""

from __future__ import annotations

from workloads.api.recipes import MULTIPLES, unsupported_rate_reason


def infeasible_reason(dtype: str, sequence_length: int, architecture: str) -> str:
    """Return why a device does not train in this data type or with these sequences; empty if it does."""
    if reason := unsupported_rate_reason(dtype, architecture):
        return f"dtype={dtype} is {reason}"
    if dtype not in MULTIPLES:
        return ""
    if architecture.startswith("gfx"):
        return f"dtype={dtype} has kernels for NVIDIA GPUs alone in this workload"
    multiple = MULTIPLES[dtype][2]  # products sum over tokens for the gradients of weights
    if sequence_length % multiple:
        return f"sequence_length={sequence_length}: dtype={dtype} needs a multiple of {multiple}"
    return ""
