"""Count the bytes that copies of weights and gradients move: casts, collective buffers, and sums over micro-batches."""

from workloads.estimator.own_trainer import keeps_weights
from workloads.estimator.placed_job import PlacedJob

HOST_LINK_GB_S = 25  # per direction between host and GPU, while all GPUs of a host copy
# Bytes copied per weight for a gather in each pass, in shardings other than FSDP2, whose code `copied_bytes` follows.
# FSDP1 gathers in place.
GATHER_COPY_BYTES = {"fsdp1": 8, "megatron_fsdp": 6}
ELEMENT = 2  # bytes per weight in a GEMM, and per gradient
STATE_BYTES = {"fp32": (4, 8), "amp": (4, 8), "bf16": (2, 4), "int8": (2, 2)}  # bytes: weight, two moments


def copied_bytes(placed: PlacedJob, ranks: int) -> float:
    """Return the bytes copied per micro-batch for each unsharded weight that `ranks` ranks share.

    FSDP2's copies follow torch/distributed/fsdp/_fully_shard (PyTorch 2.11 to 2.13). A gather casts a shard into the
    collective's buffer and copies all shards out of the buffer. With only one rank, a gather only casts and copies. A
    reduction casts gradients into a buffer (and copies them again on one rank) and adds the result to the shard.
    """
    layout = placed.layout
    sums = (layout.microbatches - 1) / layout.microbatches  # share of micro-batches that add to earlier gradients
    if layout.sharding != "fsdp2" or not layout.uses_fsdp(placed.job.state):
        gathered = GATHER_COPY_BYTES.get(layout.sharding, 0) if layout.reshard_after_forward and ranks > 1 else 0
        added = 6 if placed.trainer.main_gradients else 4  # Megatron adds in fp32, other trainers in bf16
        return gathered + (added if layout.microbatches > 1 else 0)
    state, reduced = STATE_BYTES[placed.job.state][0], placed.gradient_bytes
    gathered = placed.gathered_bytes
    cast = (state if gathered == ELEMENT else gathered) + gathered  # `cast_s` counts casts to fp8
    gather = (0 if ranks == 1 and state == gathered else cast / ranks) + 2 * gathered
    reduce = ELEMENT + reduced + (2 * reduced if ranks == 1 else 0)
    if layout.reshard_after_forward:
        return (2 - sums * keeps_weights(placed)) * gather + reduce + 3 * state * sums / ranks
    # Unsharded gradients are summed in the reduction's data type and reduced after the last micro-batch.
    added = 3 * ELEMENT if reduced == ELEMENT else 2 * reduced + ELEMENT
    return added * sums + (gather + reduce) / layout.microbatches


def host_copies_s(placed: PlacedJob, owned_weights: float) -> float:
    """Estimate how many seconds copying gradients to the host and weights back takes if the optimizer runs there."""
    if not placed.layout.offload_optimizer:
        return 0.0
    return owned_weights * (2 + 2) / (HOST_LINK_GB_S * 1e9)
