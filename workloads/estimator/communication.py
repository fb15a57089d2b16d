"""Exposed communication of a block and of a step on one GPU."""

from __future__ import annotations

from workloads.estimator.collectives import Group, all_gather_s, all_reduce_s, all_to_all_s, send_s
from workloads.estimator.placed_job import PlacedJob
from workloads.estimator.weights import Weights, divided_weights

# A collective's kernels occupy 16 to 24 of an H100's 132 multiprocessors, so that computation beside it takes longer by
# about this share of the collective's time.
CONTENTION = 0.15
ASYNC_TENSOR_EXPOSED = 0.5  # of tensor parallel collectives in pieces beside their products


def exposed(collective_s: float, beside_s: float) -> float:
    """Return what a collective adds to the computation that runs beside it."""
    hidden = min(collective_s, beside_s)
    return collective_s - hidden + CONTENTION * hidden


def tensor_s(placed: PlacedJob, layer: int) -> float:
    """Return the exposed seconds of a block's tensor parallel collectives of the residual stream, one way through it.

    Attention has an all-gather and a reduce-scatter, and so has a dense MLP; without sequence parallelism two of them
    are one all-reduce. Experts take the tokens as they are divided.
    """
    model = placed.model
    is_dense = not model.has_experts(layer) or model.shared_expert_intermediate_size > 0
    collectives = 4 if is_dense else 2
    residual = placed.tokens * placed.model.hidden_size * placed.element_bytes
    share = placed.trainer.tensor_link_share
    once = all_gather_s(placed.cluster, placed.tensor_group, residual, share)
    if placed.precision.gathered_bytes == 1:  # a quarter of the collectives gathers what a product takes in fp8
        half = all_gather_s(placed.cluster, placed.tensor_group, residual / 2, share)
        once = 0.75 * once + 0.25 * half
    return once * collectives * (ASYNC_TENSOR_EXPOSED if placed.layout.tp_overlap == "async" else 1.0)


def context_s(placed: PlacedJob, attention_s: float, *, backward: bool) -> float:
    """Return the exposed seconds of a block's exchange of keys and values."""
    group, model = placed.context_group, placed.model
    if group.ranks == 1:
        return 0.0
    keys = placed.tokens * 2 * model.kv_heads * model.head_size / placed.layout.tp * placed.element_bytes
    if placed.layout.cp_method == "allgather":
        return all_gather_s(placed.cluster, group, keys * group.ranks) * (2 if backward else 1)
    ring_s = (group.ranks - 1) * send_s(placed.cluster, group.stride, keys) * (2 if backward else 1)
    return exposed(ring_s, attention_s * (group.ranks - 1) / group.ranks)


def expert_s(placed: PlacedJob, layer: int) -> float:
    """Return the exposed seconds of sending a block's tokens to their experts and back, one way through the block."""
    model, group = placed.model, placed.expert_group
    if not model.has_experts(layer) or group.ranks == 1:
        return 0.0
    domain = placed.cluster.topology.gpus_per_domain
    nodes = max(1, group.ranks // group.ranks_per_domain(domain))
    tokens = placed.tokens / placed.layout.tp * placed.job.expert_imbalance
    token_bytes = model.hidden_size * 2
    copies = _copies(placed, group.ranks)
    remote = _copies(placed, nodes)
    once = all_to_all_s(placed.cluster, group, tokens * copies * token_bytes, tokens * remote * token_bytes)
    return 2 * once * (CONTENTION if placed.job.expert_overlap else 1.0)


def _copies(placed: PlacedJob, places: int) -> float:
    """Return how often a token leaves for other GPUs or nodes, of which there are `places`.

    DeepEP sends a token once to each place that has any of its experts.
    """
    count = placed.model.experts_per_token
    if placed.job.dispatcher == "deepep":
        return (places - 1) * (1 - (1 - 1 / places) ** count)
    return count * (places - 1) / places


def gather_s(placed: PlacedJob, weights: Weights) -> float:
    """Return the seconds of gathering sharded weights."""
    size = placed.precision.gathered_bytes
    shared_s = all_gather_s(placed.cluster, placed.shard_group, size * weights.shared)
    if not weights.experts:
        return shared_s
    return shared_s + all_gather_s(placed.cluster, placed.expert_shard_group, size * weights.experts)


def scatter_s(placed: PlacedJob, weights: Weights) -> float:
    """Return the seconds of reducing gradients over shards."""
    shards, experts = placed.shard_group, placed.expert_shard_group
    total_s = all_gather_s(placed.cluster, shards, weights.shared * placed.gradient_bytes)
    if weights.experts:
        total_s += all_gather_s(placed.cluster, experts, weights.experts * placed.gradient_bytes)
    return total_s


def average_s(placed: PlacedJob, weights: Weights) -> float:
    """Return the seconds of averaging the gradients that a rank owns over copies of the model."""
    owned_bytes = divided_weights(placed, weights) * placed.gradient_bytes
    return all_reduce_s(placed.cluster, placed.replicate_group, owned_bytes)


def reduce_s(placed: PlacedJob, weights: Weights) -> float:
    """Return the seconds of reducing gradients: scattered over shards, then averaged over copies."""
    return scatter_s(placed, weights) + average_s(placed, weights)


def all_reduced_s(placed: PlacedJob, weights: Weights) -> float:
    """Return the seconds of averaging gradients that no rank divides."""
    group = Group(placed.layout.dp * placed.layout.cp, placed.layout.tp)
    return all_reduce_s(placed.cluster, group, weights.total * placed.gradient_bytes)


def pipeline_send_s(placed: PlacedJob) -> float:
    """Return the seconds of sending a micro-batch's residual stream to the next stage.

    Each tensor parallel rank sends its part, also without sequence parallelism: Megatron-LM gathers the parts over
    NVLink afterwards (arXiv 2104.04473, section 4.1).
    """
    layout = placed.layout
    parts = layout.tp if placed.trainer.core == "megatron" else placed.residual_parts
    total_bytes = placed.tokens * placed.model.hidden_size * placed.element_bytes / parts
    return send_s(placed.cluster, layout.tp * layout.cp * layout.dp, total_bytes)
