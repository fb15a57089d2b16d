"""Exposed communication of a block and of a step on one GPU."""

from __future__ import annotations

from workloads.planner.collectives import all_gather_s, all_reduce_s, all_to_all_s, send_s
from workloads.planner.setting import Setting
from workloads.planner.sizes import has_experts

# A collective's kernels take 16 to 24 of an H100's 132 multiprocessors and a part of the memory's bandwidth, so that
# computation beside it takes longer by about this share of the collective's time.
CONTENTION = 0.2
ASYNC_TENSOR_EXPOSED = 0.5  # of tensor parallel collectives in pieces beside their products


def exposed(collective_s: float, beside_s: float) -> float:
    """Return what a collective adds to the computation that runs beside it."""
    hidden = min(collective_s, beside_s)
    return collective_s - hidden + CONTENTION * hidden


def tensor_s(setting: Setting, collectives: int) -> float:
    """Return the exposed seconds of a block's tensor parallel collectives of the residual stream.

    With sequence parallelism each is an all-gather or a reduce-scatter; without, two of them are one all-reduce.
    """
    residual = setting.tokens * setting.model.hidden_size * 2
    once = all_gather_s(setting.cluster, setting.tensor_group, residual, setting.trainer.tensor_link_share)
    return once * collectives * (ASYNC_TENSOR_EXPOSED if setting.layout.tp_overlap == "async" else 1.0)


def context_s(setting: Setting, attention_s: float, *, backward: bool) -> float:
    """Return the exposed seconds of a block's exchange of keys and values."""
    group, model = setting.context_group, setting.model
    if group.ranks == 1:
        return 0.0
    keys = setting.tokens * 2 * model.kv_heads * model.head_size / setting.layout.tp * 2
    if setting.layout.cp_method == "allgather":
        return all_gather_s(setting.cluster, group, keys * group.ranks) * (2 if backward else 1)
    ring_s = (group.ranks - 1) * send_s(setting.cluster, group.stride, keys) * (2 if backward else 1)
    return exposed(ring_s, attention_s * (group.ranks - 1) / group.ranks)


def expert_s(setting: Setting, layer: int) -> float:
    """Return the exposed seconds of sending a block's tokens to their experts and back, one way through the block."""
    model, group = setting.model, setting.expert_group
    if not has_experts(model, layer) or group.ranks == 1:
        return 0.0
    domain = setting.cluster.topology.gpus_per_domain
    nodes = max(1, group.ranks // group.ranks_per_domain(domain))
    tokens = setting.tokens / setting.layout.tp * setting.job.expert_imbalance
    token_bytes = model.hidden_size * 2
    copies = model.experts_per_token * (group.ranks - 1) / group.ranks
    if setting.job.dispatcher == "deepep":
        remote = (nodes - 1) * (1 - (1 - 1 / nodes) ** model.experts_per_token)
    else:
        remote = model.experts_per_token * (nodes - 1) / nodes
    once = all_to_all_s(setting.cluster, group, tokens * copies * token_bytes, tokens * remote * token_bytes)
    return 2 * once * (CONTENTION if setting.job.expert_overlap else 1.0)


def gather_s(setting: Setting, weights: float) -> float:
    """Return the seconds of gathering sharded weights in 2 bytes."""
    return all_gather_s(setting.cluster, setting.shard_group, 2 * weights)


def reduce_s(setting: Setting, weights: float) -> float:
    """Return the seconds of reducing gradients: scattered over shards, then averaged over copies."""
    gradient_bytes = weights * setting.gradient_bytes
    shards = setting.shard_group
    scatter_s = all_gather_s(setting.cluster, shards, gradient_bytes)
    return scatter_s + all_reduce_s(setting.cluster, setting.replicate_group, gradient_bytes / shards.ranks)


def pipeline_send_s(setting: Setting) -> float:
    """Return the seconds of sending a micro-batch's residual stream to the next stage."""
    layout = setting.layout
    total_bytes = setting.tokens * setting.model.hidden_size * 2 / setting.residual_parts
    return send_s(setting.cluster, layout.tp * layout.cp * layout.dp, total_bytes)
