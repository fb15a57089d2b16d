"""Estimate each pipeline rank's peak memory in GiB, as the framework reports it."""

from collections.abc import Sequence
from dataclasses import replace

from workloads.estimator.communication import STATE_BYTES
from workloads.estimator.estimate import StageMemory
from workloads.estimator.own_trainer import is_counted, own_saved_elements
from workloads.estimator.pipeline import head_rank, in_flight, peak_ranks, rank_layers
from workloads.estimator.placed_job import PlacedJob, Weights, block_gpu_weights, divided_weights, rank_weights
from workloads.hardware.cluster import Cluster
from workloads.layouts.layout import Job
from workloads.layouts.trainers import is_own

GIB = 2**30
RUNTIME_GIB = 1.5  # CUDA context, NCCL buffers, library workspaces
OPTIMIZER_STATES = 2  # AdamW's moments per weight, in the weight's data type
OWN_WORKSPACES_GIB = 0.35  # library workspaces, which PyTorch counts as allocated: the maximum measured
LOSS_CHUNK_TOKENS = 2048  # the loss processes chunks of this many tokens and never allocates all logits


def peak_memory(job: Job, cluster: Cluster) -> StageMemory:
    """Return the memory of the pipeline rank that needs the most: the maximum of `stage_memories`."""
    ranks = peak_ranks(rank_layers(job.model, job.layout), head_rank(job.layout))
    return max(stage_memories(PlacedJob(job, cluster), ranks), key=lambda stage: stage.total_gib)


def stage_memories(placed: PlacedJob, ranks: Sequence[int] | None = None) -> tuple[StageMemory, ...]:
    model, layout = placed.model, placed.layout
    layers = rank_layers(model, layout)
    ranks = range(len(layers)) if ranks is None else ranks
    if is_counted(placed):
        return tuple(_own_memory(placed, rank, sum(some.number for some in layers[rank])) for rank in ranks)
    # Bytes that a block of each kind saves per micro-batch, and bytes that recomputing a block holds, gradients
    # included.
    saved = {layer: saved_bytes(placed, layer) for layer in model.layer_kinds.values()}
    recomputed = 0.0
    if layout.checkpointing != "none":
        whole = max(2 * placed.tokens * saved_elements(placed, layer, "none") for layer in saved)
        recomputed = 1.25 * (whole + _score_bytes(placed))
    if is_own(placed.job):  # a block's expert gradients are whole before they are added to other tokens' gradients
        copies = 2 if layout.tp > 1 and layout.ep == 1 else 1  # their sum over tensor-parallel ranks is a copy
        recomputed += copies * placed.element_bytes * max(block_gpu_weights(placed, layer).experts for layer in saved)
    # Logits, logit gradients, and the loss's copies of both.
    tokens = min(placed.tokens, LOSS_CHUNK_TOKENS) if placed.trainer.chunked_loss else placed.tokens
    loss = tokens * model.vocabulary / layout.tp * _logit_bytes(placed)
    if layout.tp > 1 and layout.sequence_parallel:  # the head's input and the input's gradient, for the whole sequence
        loss += tokens * model.hidden_size * 2 * 2
    # When the head's weights get their gradient: inputs of the last norm and the head, a gradient of an input, that of
    # the logits, the table of rotary embeddings, and tokens and labels of 8 bytes.
    features = 3 * model.hidden_size / placed.residual_parts + 2 * model.head_size + 2 * 4
    head = tokens * (features + model.vocabulary / layout.tp) * 2
    memories = []
    for rank in ranks:
        has_head = rank == head_rank(layout)
        weights = rank_weights(placed, rank, layers[rank])
        weights = replace(weights, shared=weights.shared + model.hidden_size * has_head)  # the last norm
        parameters, gradients, moments = _states(placed, weights)
        activations = sum(saved[some.layer] * some.number for some in layers[rank]) * in_flight(rank, layout)
        last = layers[rank][-1].layer
        buffers = placed.trainer.buffers_gib * GIB
        uses = {"parameters": parameters, "gradients": gradients, "optimizer_states": moments}
        uses |= {"activations": activations, "gathered": _gathered_bytes(placed, weights, last) + buffers}
        first, end = _backward_bytes(placed, weights, last)
        peaks = (
            uses | {"working": max(recomputed, loss * has_head)},
            uses | {"gathered": first + buffers, "working": max(recomputed, head * has_head)},
            uses | {"gathered": end + buffers, "working": recomputed, "activations": saved[layers[rank][0].layer]},
        )
        memories.append(max((_in_gib(placed, **peak) for peak in peaks), key=lambda memory: memory.total_gib))
    return tuple(memories)


def _in_gib(placed: PlacedJob, **uses: float) -> StageMemory:
    """Return a rank's memory from the bytes of each use, with the runtime and what the allocator reserves."""
    sizes = {name: used / GIB for name, used in uses.items()}
    return StageMemory(**sizes, runtime=RUNTIME_GIB, reserved=placed.trainer.reserved_share * sum(sizes.values()))


def _is_gathered(placed: PlacedJob) -> bool:
    """Return whether weights are gathered or cast for use. Neither is needed on one GPU with all weights in bf16."""
    return placed.is_sharded and (placed.shard_group.ranks > 1 or placed.job.state != "bf16")


def _states(placed: PlacedJob, weights: Weights) -> tuple[float, float, float]:
    layout, job = placed.layout, placed.job
    weight_bytes, moment_bytes = STATE_BYTES[job.state]
    moment_bytes = job.moment_bytes or moment_bytes
    if layout.offload_optimizer:
        weight_bytes, moment_bytes = 2, 0
    usual_bytes = 4 if placed.trainer.main_gradients or weight_bytes == 4 else 2
    gradient_bytes = (placed.trainer.main_gradients and placed.job.gradient_bytes) or usual_bytes
    owned, whole = divided_weights(placed, weights), weights.total
    if _is_gathered(placed):
        # The gathered memory includes whole gradients.
        divided = weights.total - _gathered_weights(placed, weights) if _has_whole_gradients(placed) else owned
        gradients = 0.0 if layout.offload_optimizer else divided * gradient_bytes
        return owned * weight_bytes, gradients, owned * moment_bytes
    owned = whole if layout.sharding == "none" else owned
    # In the GEMM data type, in addition to sharded master weights; autocast makes DDP's (`_gathered_bytes`).
    copies = whole * 2 if weight_bytes == 4 and not _is_ddp(placed) else 0
    gradients = (owned if layout.sharding == "zero2" else whole) * gradient_bytes
    if _is_ddp(placed) and layout.microbatches > 1:
        gradients *= 2  # and the buckets that are reduced (PyTorch's default, gradient_as_bucket_view=False)
    return copies + owned * weight_bytes, gradients, owned * moment_bytes


def _is_ddp(placed: PlacedJob) -> bool:
    is_pytorch = placed.trainer.core == "pytorch" and not is_own(placed.job)
    return is_pytorch and placed.layout.sharding == "none" and placed.layout.dp > 1


def _has_whole_gradients(placed: PlacedJob) -> bool:
    """Return whether weights and gradients stay unsharded until the last micro-batch, as in FSDP2's pipelines.

    In this project's pipelines, they do so with resharding too: PyTorch's stages turn it off
    (`backward_maybe_with_nosync` in distributed/pipelining/stage.py).
    """
    layout = placed.layout
    if is_own(placed.job):
        return layout.microbatches > 1 and (layout.pp > 1 or not placed.reduces_each)
    return layout.pp > 1 and not layout.reshard_after_forward


def _gathered_weights(placed: PlacedJob, weights: Weights) -> float:
    """Return the weights that FSDP manages. These exclude experts that this project's trainer divides among ranks."""
    return weights.shared if is_own(placed.job) and placed.layout.ep > 1 else weights.total


def _gathered_bytes(placed: PlacedJob, weights: Weights, layer: int) -> float:
    """Return the bytes that FSDP holds unsharded: two blocks and one block's gradients, or all blocks; with DDP,
    the bytes of autocast's copies."""
    if not _is_gathered(placed):
        is_cast = STATE_BYTES[placed.job.state][0] == 4 and not placed.layout.offload_optimizer
        return weights.total * 2 if is_cast and _is_ddp(placed) else 0.0
    if _has_whole_gradients(placed):
        return _gathered_weights(placed, weights) * (2 + placed.gradient_bytes)
    block = _gathered_block(placed, layer)
    if not placed.layout.reshard_after_forward:
        return _gathered_weights(placed, weights) * 2 + placed.gradient_bytes * block
    ends = placed.model.head_weights / placed.layout.tp
    return max(2 * 2 * block + placed.gradient_bytes * block, 2 * ends + 2 * block) + 2 * ends


def _gathered_block(placed: PlacedJob, layer: int) -> float:
    block = block_gpu_weights(placed, layer)
    is_cast = is_own(placed.job) and placed.layout.ep == 1  # also on one rank
    return block.shared + (block.experts if is_cast or placed.expert_shard_group.ranks > 1 else 0.0)


def _backward_bytes(placed: PlacedJob, weights: Weights, layer: int) -> tuple[float, float]:
    """Return `_gathered_bytes` during the first blocks of the backward pass, and at its end, both after the loss.

    In PyTorch (2.13, `_fsdp_param_group.py`), FSDP2 has the gathered buffer of the next unit, and until the next
    reduction the buffer of the last one. In a forward pass, it has the buffers of two units.
    """
    layout, reduced, is_repeated = placed.layout, placed.gradient_bytes, placed.layout.microbatches > 1
    gathered, ends = _gathered_bytes(placed, weights, layer), placed.model.head_weights / layout.tp
    if _is_ddp(placed):
        size = STATE_BYTES[placed.job.state][0]
        # A new gradient of the head or the embedding, before it is added; the buckets are a copy of all gradients.
        return gathered + size * ends, size * (ends if is_repeated else weights.total)
    is_fsdp2 = placed.trainer.core == "pytorch" and layout.sharding == "fsdp2" and not is_own(placed.job)
    if not is_fsdp2 or not _is_gathered(placed) or _has_whole_gradients(placed):
        return gathered, gathered
    block = _gathered_block(placed, layer)
    # The head's and the blocks' gradients, and their reductions.
    first = max(4 * ends + 2 * block, (2 + reduced) * ends + 2 * block, 6 * block + reduced * max(block, ends))
    if not layout.reshard_after_forward:
        kept = 2 * _gathered_weights(placed, weights)
        first = kept + max(2 * (block + ends), reduced * ends, 2 * block + (reduced - 2) * ends)
    # Tensor-parallel ranks have the gradient of the whole embedding, whose sum they divide.
    whole = 2 * ends * layout.tp if layout.tp > 1 else 0.0
    end = max(4 * block + 2 * ends + reduced * block, 4 * ends + whole + reduced * block, (2 + reduced) * ends)
    new = max(block, ends) / placed.shard_group.ranks * reduced * is_repeated  # a shard before it is added
    if layout.dp_replicate > 1 and is_repeated:
        return first + new, end + divided_weights(placed, weights) * reduced  # all are kept until a pass ends
    return first + new, end + new


def saved_bytes(placed: PlacedJob, layer: int) -> float:
    """Return the bytes of activations that a block saves for the backward pass of one micro-batch."""
    model, layout = placed.model, placed.layout
    share = placed.checkpointed_share
    kept = saved_elements(placed, layer, layout.checkpointing)
    if layout.checkpointing == "per_op" and not placed.job.compiled:
        kept += model.hidden_size / placed.residual_parts  # the last GEMM's output is unused; a compiler drops it
    everything = saved_elements(placed, layer, "none") if share < 1 else kept
    values = placed.tokens * (share * kept + (1 - share) * everything) * 2
    return values + (_score_bytes(placed) if layout.checkpointing in ("none", "norm_act") else 0.0)


def _score_bytes(placed: PlacedJob) -> float:
    if placed.attention_kernel != "unfused":
        return 0.0
    return placed.tokens * placed.job.sequence_length * placed.model.heads / placed.layout.tp * 5


def _logit_bytes(placed: PlacedJob) -> float:
    """Return the peak number of bytes per logit. A compiled or fused loss holds the logits and their gradient, in bf16.
    PyTorch's loss over tensor-parallel ranks makes one more fp32 copy than the loss on one rank
    (torch/distributed/tensor/parallel/loss.py)."""
    trainer, job = placed.trainer, placed.job
    if job.fused_loss or (job.compiled and job.compiled_loss and trainer.compiles_loss):
        return 2 * placed.element_bytes
    return trainer.logit_bytes + (4 if placed.layout.tp > 1 and trainer.core == "pytorch" else 0)


def saved_elements(placed: PlacedJob, layer: int, checkpointing: str) -> float:
    """Return the number of 2-byte values that a block saves per token."""
    model, tp = placed.model, placed.layout.tp
    residual = model.hidden_size / placed.residual_parts
    streams = model.residual_features / placed.residual_parts
    if checkpointing == "full":
        return streams
    queries, keys, outputs = _mixer_elements(placed, layer)
    copies = model.experts_per_token * placed.buffered_rows if model.has_experts(layer) else 0
    if checkpointing == "selective" and is_own(placed.job):
        copies = 0  # all expert rows are recomputed (`parallel.stage.SAVED_OPS`)
    width = (copies * model.expert_intermediate_size + model.shared_expert_intermediate_size) / tp
    if not copies:
        width = model.intermediate_size / tp if model.has_mlp(layer) else 0
    gated = model.mlp_matrices == 3
    routed = 2 * copies * model.hidden_size / tp
    if checkpointing == "per_op":  # the block's input, attention, and every second GEMM's output
        products = queries + keys / 2 + width + routed
        return streams + outputs + products * (1.0 if placed.saves_products else placed.plain_share)
    inside = (3 if gated else 2) * width  # the activation's inputs and its result
    # A hyper-connection saves the streams and the output of attention or the MLP, which it adds to them.
    outputs += model.norms * (streams + residual) if model.streams else 0.0
    if checkpointing in ("norm_act", "selective", "selective_up"):
        return model.norms * residual + queries + outputs + keys + (inside - width) + routed
    # PyTorch saves the gathered input of a tensor-parallel GEMM; Megatron gathers the input again (arXiv 2205.05198).
    gathered = 2 * model.hidden_size if tp > 1 and placed.trainer.core == "pytorch" else 0.0
    if not (placed.trainer.fused or placed.job.compiled):  # one more for each: the activation, and attention over ranks
        inside += width if gated else 0.0
        outputs *= 2 if placed.layout.cp > 1 else 1
    return 2 * model.norms * residual + queries + outputs + keys + inside + routed + gathered


def _mixer_elements(placed: PlacedJob, layer: int) -> tuple[float, float, float]:
    """Return the number of values per token of a mixer's core: its queries, its keys and values, and its outputs."""
    model, tp = placed.model, placed.layout.tp
    match model.mixer(layer):
        case "none":
            return 0.0, 0.0, 0.0
        case "linear":  # values before and after the convolution
            return 2 * model.linear_in / tp, 0.0, 2 * model.linear_out / tp
    keys = model.kv_features / min(model.kv_heads, tp)
    latent = model.query_rank + model.kv_rank + model.rope_size + model.compressor_features(layer)
    if model.index_features(layer):  # the indexer's queries, key and weights, and the chosen tokens' indices
        latent += (model.index_heads + 1) * (model.index_size + 1) + 2 * (model.selected_keys or model.window)
    return model.heads * model.head_size / tp + latent, keys, model.heads * model.value_features / tp


def _own_memory(placed: PlacedJob, rank: int, layers: int) -> StageMemory:
    """Return a pipeline rank's peak memory in this project's trainer, counted tensor by tensor. With fp32 states, the
    sharded weight, gradient and two AdamW states take 16 bytes per parameter, and a gathered weight takes 2 more.
    Memory peaks at the start of the last backward pass, when all activations are saved, in the first layer, when all
    gradients exist, or at the end, when FSDP has gathered the embedding again and is reducing its gradient."""
    layout, element_bytes = placed.layout, placed.element_bytes
    state_bytes = 4 if placed.job.state == "fp32" else element_bytes  # per weight, gradient and moment
    uses_fsdp = layout.uses_fsdp(placed.job.state)
    # A pipeline keeps weights and gradients unsharded between micro-batches, as without resharding.
    gathers_each_pass = uses_fsdp and layout.reshard_after_forward and layout.pp == 1
    # Parameters of a tensor-parallel rank, not sharded. A tied model's head is its embedding.
    layer = block_gpu_weights(placed, 0).total
    matrix = placed.model.head_weights / layout.tp
    embedding, head = matrix if rank == 0 else 0.0, matrix if rank == head_rank(layout) else 0.0
    total = layers * layer + embedding + (0.0 if placed.model.tied else head)
    sharded = total / placed.shard_group.ranks
    is_whole = uses_fsdp and layout.microbatches > 1 and (layout.pp > 1 or not placed.reduces_each)
    gradients = total if is_whole else sharded
    gathered = 0.0 if not uses_fsdp else head if gathers_each_pass else total  # in addition to the layers in use

    saved = own_saved_elements(placed, layout.checkpointing)
    everything = own_saved_elements(placed, "none")
    checkpointed = int(layers * placed.checkpointed_share)  # the smallest number that a rank can have
    saved_by_all = checkpointed * saved + (layers - checkpointed) * everything
    # A loss chunk holds logits and their gradient. With tensor parallelism, the eager loss holds more fp32 copies.
    logit_bytes = 16 if layout.tp > 1 else 2 * element_bytes
    logits = min(LOSS_CHUNK_TOKENS, placed.tokens) * placed.model.vocabulary / layout.tp * logit_bytes
    loss_bytes = logits + head * element_bytes if head else 0.0
    held_layers = 3 if gathers_each_pass else 1  # two layers' weights and one layer's gradients
    # FSDP's reduction buffer holds the gradients of what was differentiated before: the head at first, then a layer.
    reduced = layer if state_bytes > element_bytes else 0.0
    model = placed.model
    backward = everything - saved + (3 * model.intermediate_size + 2 * model.hidden_size) / layout.tp
    backward_bytes = placed.tokens * backward * element_bytes + held_layers * layer * element_bytes

    def count(gradients: float, gathered: float, activations: float, working_bytes: float) -> StageMemory:
        return _in_gib(
            placed,
            parameters=sharded * state_bytes,
            optimizer_states=OPTIMIZER_STATES * sharded * state_bytes,
            gradients=gradients * state_bytes,
            gathered=gathered * element_bytes,
            activations=placed.tokens * activations * element_bytes,
            working=working_bytes + OWN_WORKSPACES_GIB * GIB,
        )

    first = gradients if layout.microbatches > 1 else head / placed.shard_group.ranks
    working_bytes = max(loss_bytes, backward_bytes + max(head, reduced) * state_bytes)
    again, tied = (embedding if gathers_each_pass else 0.0) * (not model.tied), (head if model.tied else 0.0)
    # A tied matrix stays gathered, and its gradient waits for the embedding's.
    first_bytes = reduced * state_bytes + tied * element_bytes * (uses_fsdp and not is_whole)
    peaks = (
        count(first, gathered, in_flight(rank, layout) * saved_by_all, working_bytes),
        count(gradients, tied if gathers_each_pass else gathered, saved, backward_bytes + first_bytes),
        count(gradients, gathered + again, 0.0, embedding * (element_bytes + state_bytes * uses_fsdp)),
    )
    return max(peaks, key=lambda memory: memory.total_gib)
