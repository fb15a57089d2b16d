"""Activations that this project's trainer saves per micro-batch, and whether weights stay gathered for the next one."""

from workloads.estimator.placed_job import PlacedJob, block_gpu_weights
from workloads.layouts.trainers import is_own


def is_counted(placed: PlacedJob) -> bool:
    """Return whether the job uses this project's trainer and only features that this module counts."""
    job, layout = placed.job, placed.layout
    return (
        is_own(job)
        and job.model.activation == "swiglu"
        and not job.model.experts
        and not job.model.kv_rank
        and not job.model.linear_layers
        and job.state in ("fp32", "bf16")
        and (layout.sharding == "fsdp2" or (layout.sharding == "none" and layout.dp_shard * layout.cp == 1))
        and layout.checkpointing in ("none", "selective_up", "selective", "full")
        and not layout.offload_optimizer
    )


def own_saved_elements(placed: PlacedJob, checkpointing: str) -> float:
    """Return the number of elements per token and layer that the trainer saves for the backward pass.

    A block with a manual backward pass saves the tensors in `ManualBackwardBlock.SAVED_ACTIVATIONS`. In other blocks,
    sequence parallelism divides the saved residual stream, and tensor parallelism divides the saved tensors inside
    attention and MLP. If tensors are gathered before a GEMM or reduced after it, PyTorch saves them whole.
    """
    model, layout = placed.model, placed.layout
    if checkpointing == "full":
        return model.hidden_size / layout.tp
    attention, keys_values = model.heads * model.head_size, 2 * model.kv_heads * model.head_size
    qkv, selective = attention + keys_values, checkpointing.startswith("selective")
    halves = {"selective": 0, "selective_up": 1}.get(checkpointing, 2)  # saved outputs of gate and up
    if placed.job.manual_backward:
        return 2 * model.hidden_size + qkv + attention + halves * model.intermediate_size
    if placed.job.precision.startswith("fp8") and not selective:  # measured: GEMM inputs stay in fp8
        return 3 * model.hidden_size + qkv + attention + 2 * model.intermediate_size
    # Attention with gathered keys and values saves all ranks' tensors; ring attention saves only this rank's tensors.
    exchanged = keys_values * (1 if layout.cp_method == "ring" else layout.cp) if layout.cp > 1 else 0
    if selective:  # tensors that `parallel.stage._save_all_but` saves and the backward pass reads
        return (2 * model.hidden_size + qkv + attention + exchanged + halves * model.intermediate_size) / layout.tp
    inside = 2 * qkv + attention + 3 * model.intermediate_size
    return (2 * model.hidden_size + inside + (exchanged or model.hidden_size)) / layout.tp + 2 * model.hidden_size


def keeps_weights(placed: PlacedJob) -> bool:
    """Return whether weights stay gathered from one micro-batch's backward pass to the next micro-batch's forward pass.

    Weights stay gathered if the backward passes free more activation memory than the blocks' weights, the embedding and
    its gradient need together. The memory peak then stays the same.
    """
    layout = placed.layout
    if not (is_counted(placed) and layout.uses_fsdp(placed.job.state) and layout.reshard_after_forward):
        return False
    saved = placed.tokens * own_saved_elements(placed, layout.checkpointing)
    freed = placed.model.layers * (saved - block_gpu_weights(placed, 0).total)
    return layout.pp == 1 and layout.microbatches > 1 and freed >= 2 * placed.model.embedding_weights / layout.tp
