"""Which data types a device trains in, and with which sequences. No torch: a plan shows it before anything starts."""

from __future__ import annotations

from workloads.api.recipes import MULTIPLES, unsupported_rate_reason


def unsupported_dtype_reason(dtype: str, architecture: str) -> str:
    """Return why a device does not train in this data type, as what follows "it is"; empty if it does."""
    if reason := unsupported_rate_reason(dtype, architecture):
        return reason
    if dtype in MULTIPLES and architecture.startswith("gfx"):
        return "not for AMD's GPUs: its kernels are for NVIDIA's alone in this workload"
    return ""


def infeasible_reason(dtype: str, sequence_length: int, architecture: str) -> str:
    """Return why a device does not train in this data type or with these sequences; empty if it does."""
    if reason := unsupported_dtype_reason(dtype, architecture):
        return f"dtype={dtype} is {reason}"
    multiple = MULTIPLES[dtype][2] if dtype in MULTIPLES else 1  # products sum over tokens for gradients of weights
    if sequence_length % multiple:
        return f"sequence_length={sequence_length}: dtype={dtype} needs a multiple of {multiple}"
    return ""
