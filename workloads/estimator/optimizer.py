"""Seconds of the optimizer's step, on the GPU or on the host."""

from __future__ import annotations

from workloads.estimator.placed_job import PlacedJob

# AdamW reads the weight, its gradient and two moments, and writes all but the gradient: 28 bytes in fp32, and 2 for the
# copy in bf16; clipping reads the gradients once more.
UPDATE_BYTES = {"fp32": 34, "amp": 32, "bf16": 16, "int8": 16}
# Memory bandwidth of a host of eight GPUs that its processors reach in AdamW's update. Assumed: a quarter of the 600
# GB/s of two sockets with DDR5. No microbenchmark of it is known to us.
HOST_GB_S = 150
HOST_LINK_GB_S = 25  # between host and GPU, each way, while all GPUs of a host copy


def optimizer_s(placed: PlacedJob, owned_weights: float) -> float:
    """Return the seconds of updating a GPU's own weights."""
    update_bytes = UPDATE_BYTES[placed.job.state] * owned_weights
    if not placed.layout.offload_optimizer:
        return placed.copy_s(update_bytes)
    gpus = min(placed.cluster.gpus, placed.cluster.topology.gpus_per_domain)
    return update_bytes * gpus / (HOST_GB_S * 1e9)


def host_copies_s(placed: PlacedJob, owned_weights: float) -> float:
    """Return the seconds of copying gradients to the host and weights back, where the optimizer is there."""
    if not placed.layout.offload_optimizer:
        return 0.0
    return owned_weights * (2 + 2) / (HOST_LINK_GB_S * 1e9)
