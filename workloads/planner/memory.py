"""GiB of each pipeline rank at its peak, as the framework reports it."""

from __future__ import annotations

from workloads.planner.estimate import StageMemory
from workloads.planner.pipeline import RankLayers, head_rank, in_flight, rank_layers
from workloads.planner.setting import Setting
from workloads.planner.sizes import embedding_weights, expert_weights, has_experts, head_weights, shared_weights

GIB = 2**30
RUNTIME_GIB = 1.5  # the context, the communication library's buffers and the libraries' workspaces
STATE_BYTES = {"fp32": (4, 8), "amp": (4, 8), "bf16": (2, 4), "int8": (2, 2)}  # of a weight and of its moments


def stage_memories(setting: Setting) -> tuple[StageMemory, ...]:
    """Return the memory of each pipeline rank."""
    ranks = rank_layers(setting.model, setting.layout)
    return tuple(_stage_memory(setting, rank, layers) for rank, layers in enumerate(ranks))


def _stage_memory(setting: Setting, rank: int, layers: tuple[RankLayers, ...]) -> StageMemory:
    weights = _gpu_weights(setting, rank, layers)
    parameters, gradients, moments = _states(setting, weights)
    activations = sum(saved_bytes(setting, some.layer) * some.count for some in layers) * in_flight(
        rank, setting.layout
    )
    working = _working_bytes(setting, layers[-1].layer, has_head=rank == head_rank(setting.layout))
    gathered = _gathered_bytes(setting, weights, layers[-1].layer)
    gathered += setting.trainer.buffers_gib * GIB
    allocated = parameters + gathered + gradients + moments + activations + working
    return StageMemory(
        parameters=parameters / GIB,
        gathered=gathered / GIB,
        gradients=gradients / GIB,
        optimizer_states=moments / GIB,
        activations=activations / GIB,
        working=working / GIB,
        runtime=RUNTIME_GIB,
        reserved=setting.trainer.reserved_share * allocated / GIB,
    )


def _gpu_weights(setting: Setting, rank: int, layers: tuple[RankLayers, ...]) -> float:
    """Return the weights of a GPU, unsharded."""
    model, layout = setting.model, setting.layout
    shared = sum(shared_weights(model, some.layer) * some.count for some in layers)
    routed = sum(expert_weights(model) * some.count for some in layers if has_experts(model, some.layer))
    is_last = rank == head_rank(layout)
    if rank == 0:
        shared += embedding_weights(model)
    if is_last and not (model.tied and rank == 0):
        shared += head_weights(model)
    return shared / layout.tp + routed / layout.ep


def _is_gathered(setting: Setting) -> bool:
    """Return whether weights are gathered, or cast, for their use: not where a GPU has them whole in bf16."""
    return setting.is_sharded and (setting.shard_group.ranks > 1 or setting.job.state != "bf16")


def _states(setting: Setting, weights: float) -> tuple[float, float, float]:
    """Return the bytes of weights with their masters, of gradients, and of the moments."""
    layout, job = setting.layout, setting.job
    weight_bytes, moment_bytes = STATE_BYTES[job.state]
    shards = setting.shard_group.ranks
    if layout.offload_optimizer:
        weight_bytes, moment_bytes = 2, 0
    gradient_bytes = 4 if setting.trainer.main_gradients or weight_bytes == 4 else 2
    if _is_gathered(setting):
        owned = weights / shards
        gradients = owned * (0 if layout.offload_optimizer or not layout.reshard_after_forward else gradient_bytes)
        return owned * weight_bytes, gradients, owned * moment_bytes
    divided = 1 if layout.sharding == "none" else shards
    copies = weights * 2 if weight_bytes == 4 else 0  # in the data type of the products, beside sharded masters
    gradients = weights * gradient_bytes / (shards if layout.sharding == "zero2" else 1)
    return copies + weights * weight_bytes / divided, gradients, weights * moment_bytes / divided


def _gathered_bytes(setting: Setting, weights: float, layer: int) -> float:
    """Return the bytes of weights that FSDP holds whole: two blocks, and the gradients of one in their reduction."""
    if not _is_gathered(setting):
        return 0.0
    if not setting.layout.reshard_after_forward:
        return weights * (2 + setting.gradient_bytes)
    model, layout = setting.model, setting.layout
    experts = expert_weights(model) / layout.ep if has_experts(model, layer) else 0.0
    block = shared_weights(model, layer) / layout.tp + experts
    ends = head_weights(model) / layout.tp
    return max(2 * 2 * block + setting.gradient_bytes * block, 2 * ends + 2 * block) + 2 * ends


def saved_bytes(setting: Setting, layer: int) -> float:
    """Return the bytes of activations that a block keeps for its backward pass of one micro-batch."""
    model, layout = setting.model, setting.layout
    share = 1.0
    if layout.checkpointed_layers is not None:
        share = min(1.0, layout.checkpointed_layers * layout.pp / model.layers)
    kept = saved_elements(setting, layer, layout.checkpointing)
    if layout.checkpointing == "per_op" and not setting.job.compiled:
        kept += model.hidden_size / setting.residual_parts  # the last product, which nothing reads: a compiler drops it
    everything = saved_elements(setting, layer, "none") if share < 1 else kept
    values = setting.tokens * (share * kept + (1 - share) * everything) * 2
    is_unfused = setting.attention_kernel == "unfused" and layout.checkpointing in ("none", "norm_act")
    scores = setting.tokens * setting.job.sequence_length * model.heads / layout.tp * 5 if is_unfused else 0.0
    return values + scores


def saved_elements(setting: Setting, layer: int, checkpointing: str) -> float:
    """Return the values of 2 bytes that a block keeps for a token."""
    model, tp = setting.model, setting.layout.tp
    residual = model.hidden_size / setting.residual_parts
    if checkpointing == "full":
        return residual
    queries, keys = model.heads * model.head_size / tp, model.kv_heads * model.head_size / tp
    copies = model.experts_per_token if has_experts(model, layer) else 0
    width = (copies * model.expert_intermediate_size + model.shared_expert_intermediate_size) / tp
    if not copies:
        width = model.intermediate_size / tp
    if setting.trainer.manual_backward and tp == setting.layout.cp == 1 and not copies:
        return 2 * residual + 2 * queries + 2 * keys + (0 if checkpointing == "selective" else 2 * width)
    gated = model.mlp_matrices == 3
    routed = 2 * copies * model.hidden_size / tp
    if checkpointing == "per_op":  # the block's input, attention, and every second product
        return residual + 2 * queries + keys + width + routed
    inside = (3 if gated else 2) * width  # the products of the activation, and its result
    if checkpointing in ("norm_act", "selective"):
        return 2 * residual + 2 * queries + 2 * keys + (inside - width) + routed
    # PyTorch saves what is gathered for a tensor parallel product; Megatron gathers it again (arXiv 2205.05198).
    gathered = 2 * model.hidden_size if tp > 1 and setting.trainer.core == "pytorch" else 0.0
    return 4 * residual + 2 * queries + 2 * keys + inside + routed + gathered


def _working_bytes(setting: Setting, layer: int, *, has_head: bool) -> float:
    """Return the bytes of temporary tensors: of a block that is computed again, or of the loss."""
    block = 0.0
    if setting.layout.checkpointing != "none":
        everything = saved_elements(setting, layer, "none")
        block = 2 * setting.tokens * (everything + saved_elements(setting, layer, "none") / 4)
    tokens = min(setting.tokens, 2048) if setting.trainer.chunked_loss else setting.tokens
    tp = setting.layout.tp
    logits = tokens * setting.model.vocabulary / tp * setting.trainer.logit_bytes
    if tp > 1 and setting.layout.sequence_parallel:  # the head's input and its gradient, of the whole sequence
        logits += tokens * setting.model.hidden_size * 2 * 2
    return max(block, logits if has_head else 0.0)
