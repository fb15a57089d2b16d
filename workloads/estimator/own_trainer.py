"""What this project's trainer saves for a micro-batch, and which weights it keeps gathered between micro-batches."""

from workloads.estimator.placed_job import PlacedJob, block_gpu_weights
from workloads.layouts.trainers import is_own


def is_counted(placed: PlacedJob) -> bool:
    """Return whether the trainer is this project's own and supports the job."""
    job, layout = placed.job, placed.layout
    return (
        is_own(job)
        and job.model.activation == "swiglu"
        and not job.model.experts
        and not job.model.kv_rank
        and not job.model.linear_layers
        and job.state in ("fp32", "bf16")
        and (layout.sharding == "fsdp2" or (layout.sharding == "none" and layout.dp_shard * layout.cp == 1))
        and layout.checkpointing in ("none", "selective", "full")
        and not layout.offload_optimizer
    )


def own_saved_elements(placed: PlacedJob, checkpointing: str) -> float:
    """Return the elements per token and layer that are saved for the backward pass.

    A block with a manual backward pass saves what `ManualBackwardBlock.SAVED_ACTIVATIONS` names. Other blocks save a
    sequence-parallel part of the residual stream, a tensor-parallel part of what is inside attention and MLP, and the
    whole of what is gathered before a product or reduced after it, which PyTorch saves as it is.
    """
    model, layout = placed.model, placed.layout
    if checkpointing == "full":
        return model.hidden_size / layout.tp
    attention, keys_values = model.heads * model.head_size, 2 * model.kv_heads * model.head_size
    qkv, selective = attention + keys_values, checkpointing == "selective"
    if placed.job.manual_backward:
        return 2 * model.hidden_size + qkv + attention + (0 if selective else 2 * model.intermediate_size)
    if placed.job.precision.startswith("fp8") and not selective:  # measured: the inputs of products stay in fp8
        return 3 * model.hidden_size + qkv + attention + 2 * model.intermediate_size
    # Attention over ranks saves the keys and values that it gathered; a ring has this rank's alone.
    exchanged = keys_values * (1 if layout.cp_method == "ring" else layout.cp) if layout.cp > 1 else 0
    if selective:  # what `parallel.stage._save_all_but` names and the backward pass reads
        return (2 * model.hidden_size + qkv + attention + exchanged) / layout.tp
    inside = 2 * qkv + attention + 3 * model.intermediate_size
    return (2 * model.hidden_size + inside + (exchanged or model.hidden_size)) / layout.tp + 2 * model.hidden_size


def keeps_weights(placed: PlacedJob) -> bool:
    """Return whether weights stay gathered from a micro-batch's backward pass to the next one's forward pass.

    They do if the blocks' weights take less memory than the activations that their backward passes free, by the size of
    the embedding and its gradient. The memory peak then stays the same.
    """
    layout = placed.layout
    if not (is_counted(placed) and layout.uses_fsdp(placed.job.state) and layout.reshard_after_forward):
        return False
    saved = placed.tokens * own_saved_elements(placed, layout.checkpointing)
    freed = placed.model.layers * (saved - block_gpu_weights(placed, 0).total)
    return layout.pp == 1 and layout.microbatches > 1 and freed >= 2 * placed.model.embedding_weights / layout.tp
