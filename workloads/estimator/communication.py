"""Estimate the time of ring and tree collectives on a topology, how much of it is exposed, and their copies."""

import math

from workloads.estimator.own_trainer import keeps_weights
from workloads.estimator.placed_job import PlacedJob, Weights, divided_weights
from workloads.hardware.cluster import Cluster, Group, Topology
from workloads.layouts.trainers import is_own

# All-gathers of large messages in nccl-tests reach 350 to 370 of an H100's 450 GB/s, and 230 to 235 of an A100's 300.
LINK_SHARE = 0.78
# nccl-tests on nodes with eight 400 Gb/s NICs reach 45 to 48 of a NIC's 50 GB/s.
NETWORK_SHARE = 0.9


def bandwidth_gb_s(cluster: Cluster, group: Group, link_share: float = LINK_SHARE) -> float:
    """Return a ring's bandwidth per direction, limited by one GPU's links or by the group's NICs in a domain.

    A group's rings enter a domain through the NICs of all the group's ranks in the domain. Groups that share a domain
    have different ranks and therefore different NICs.
    """
    topology = cluster.topology
    local = group.ranks_per_domain(topology.gpus_per_domain)
    link = topology.link_gb_s * link_share
    if topology.wiring == "pairs" and local < topology.gpus_per_domain:
        link *= max(1, local - 1) / (topology.gpus_per_domain - 1)
    if local >= group.ranks:
        return link
    network = _network_gb_s(topology)
    return min(link, local * network) if local > 1 else network


def _network_gb_s(topology: Topology) -> float:
    return topology.network_gb_s * NETWORK_SHARE / topology.oversubscription


def latency_s(cluster: Cluster, group: Group) -> float:
    """Return the latency of a ring all-gather or reduce-scatter."""
    topology = cluster.topology
    local = group.ranks_per_domain(topology.gpus_per_domain)
    domains = math.ceil(group.ranks / local)
    hops = (group.ranks - domains) * topology.link_latency_s
    return hops + (domains if domains > 1 else 0) * topology.network_latency_s


def all_gather_s(cluster: Cluster, group: Group, total_bytes: float, link_share: float = LINK_SHARE) -> float:
    """Estimate the time of a ring all-gather or reduce-scatter of `total_bytes` in seconds."""
    if group.ranks == 1:
        return 0.0
    share = (group.ranks - 1) / group.ranks
    return total_bytes * share / (bandwidth_gb_s(cluster, group, link_share) * 1e9) + latency_s(cluster, group)


def all_reduce_s(cluster: Cluster, group: Group, total_bytes: float, link_share: float = LINK_SHARE) -> float:
    """Estimate the time of an all-reduce in seconds, by ring or by tree, whichever has the lower latency."""
    if group.ranks == 1:
        return 0.0
    transfer = 2 * total_bytes * (group.ranks - 1) / group.ranks
    transfer_s = transfer / (bandwidth_gb_s(cluster, group, link_share) * 1e9)
    topology = cluster.topology
    local = group.ranks_per_domain(topology.gpus_per_domain)
    domains = math.ceil(group.ranks / local)
    tree = 2 * (local - 1) * topology.link_latency_s + 2 * math.ceil(math.log2(domains)) * topology.network_latency_s
    return transfer_s + min(2 * latency_s(cluster, group), tree)


def all_to_all_s(cluster: Cluster, group: Group, sent_bytes: float, network_bytes: float) -> float:
    """Estimate an all-to-all's time in seconds. A rank sends `sent_bytes`, `network_bytes` of them to other domains."""
    if group.ranks == 1:
        return 0.0
    topology = cluster.topology
    link_s = sent_bytes / (topology.link_gb_s * LINK_SHARE * 1e9)
    if not network_bytes:
        return link_s + topology.link_latency_s
    network_s = network_bytes / (_network_gb_s(topology) * 1e9)
    return max(link_s, network_s) + topology.link_latency_s + topology.network_latency_s


def send_s(cluster: Cluster, stride: int, total_bytes: float) -> float:
    topology = cluster.topology
    if stride < topology.gpus_per_domain:
        share = 1 / (topology.gpus_per_domain - 1) if topology.wiring == "pairs" else 1.0
        return total_bytes / (topology.link_gb_s * LINK_SHARE * share * 1e9) + topology.link_latency_s
    return total_bytes / (_network_gb_s(topology) * 1e9) + topology.network_latency_s


# A collective's kernels occupy 16 to 24 of an H100's 132 multiprocessors, so overlapping computation takes longer by
# about this share of the collective's time.
CONTENTION = 0.15
ASYNC_TENSOR_EXPOSED = 0.5  # exposed share of tensor-parallel collectives that are split to overlap with their GEMMs


def exposed(collective_s: float, beside_s: float) -> float:
    """Return the time that a collective adds to the computation that it overlaps."""
    hidden = min(collective_s, beside_s)
    return collective_s - hidden + CONTENTION * hidden


def tensor_s(placed: PlacedJob, layer: int) -> float:
    """Estimate the exposed time in seconds of a block's tensor-parallel collectives in one pass.

    On the residual stream, attention and a dense MLP each need an all-gather and a reduce-scatter. Without sequence
    parallelism, an all-reduce replaces each pair. Experts need no collective, because their tokens are already divided;
    nor does this project's shared expert, which is whole on each rank.
    """
    model = placed.model
    is_dense = not model.has_experts(layer) or (model.shared_expert_intermediate_size > 0 and not is_own(placed.job))
    collectives = 2 * (model.mixer(layer) != "none") + 2 * (model.has_mlp(layer) and is_dense)
    if not collectives:
        return 0.0
    residual = placed.tokens * placed.model.hidden_size * placed.element_bytes
    share = placed.trainer.tensor_link_share
    once = all_gather_s(placed.cluster, placed.tensor_group, residual, share)
    if placed.precision.gathered_bytes == 1:  # a quarter of the collectives gather fp8 GEMM inputs
        half = all_gather_s(placed.cluster, placed.tensor_group, residual / 2, share)
        once = 0.75 * once + 0.25 * half
    if placed.layout.tp > model.kv_heads:  # Megatron divides the projections evenly and gathers their outputs
        queries_keys_values = placed.tokens * (model.heads * model.head_size + model.kv_features)
        gathered_bytes = queries_keys_values * placed.element_bytes
        once += all_gather_s(placed.cluster, placed.tensor_group, gathered_bytes, share) / collectives
    return once * collectives * (ASYNC_TENSOR_EXPOSED if placed.layout.tp_overlap == "async" else 1.0)


def context_s(placed: PlacedJob, attention_s: float, *, backward: bool) -> float:
    """Estimate the exposed time in seconds of a block's exchange of keys and values."""
    group, model = placed.context_group, placed.model
    if group.ranks == 1:
        return 0.0
    keys = placed.tokens * model.kv_features / min(model.kv_heads, placed.layout.tp) * placed.element_bytes
    if placed.layout.cp_method == "allgather":
        return all_gather_s(placed.cluster, group, keys * group.ranks) * (2 if backward else 1)
    ring_s = (group.ranks - 1) * send_s(placed.cluster, group.stride, keys) * (2 if backward else 1)
    return exposed(ring_s, attention_s * (group.ranks - 1) / group.ranks)


def expert_s(placed: PlacedJob, layer: int) -> float:
    """Estimate the exposed time, in seconds, of sending a block's tokens to their experts and back in one pass."""
    model, group = placed.model, placed.expert_group
    if not model.has_experts(layer) or group.ranks == 1:
        return 0.0
    if placed.job.dispatcher == "allgather":
        # Whole tokens and outputs, and each token's expert indices and weights in fp32 (workloads/llama/experts.py).
        tokens = placed.tokens / placed.layout.tp * group.ranks
        gathered_bytes = tokens * model.hidden_size * placed.element_bytes
        choice_bytes = tokens * model.experts_per_token * 8
        gathers_s = [all_gather_s(placed.cluster, group, total) for total in (gathered_bytes, choice_bytes)]
        return 2 * gathers_s[0] + gathers_s[1]
    domain = placed.cluster.topology.gpus_per_domain
    local = group.ranks_per_domain(domain)
    # In racks of 72, eight of 64 consecutive GPUs can be in one rack and 56 in the next, unless nodes come in blocks,
    # as HybridEP requires (NeMo AutoModel, PR 3914).
    if placed.job.dispatcher == "alltoall" and placed.cluster.gpus > domain:
        local = math.gcd(local, domain)
    nodes = max(1, group.ranks // local)
    tokens = placed.tokens / placed.layout.tp * placed.imbalance
    token_bytes = (model.expert_hidden_size or model.hidden_size) * 2
    copies = _copies(placed, group.ranks)
    remote = _copies(placed, nodes)
    once = all_to_all_s(placed.cluster, group, tokens * copies * token_bytes, tokens * remote * token_bytes)
    return 2 * once * (CONTENTION if placed.job.expert_overlap else 1.0)


def _copies(placed: PlacedJob, places: int) -> float:
    """Return how often a token is sent to other GPUs or nodes. DeepEP sends one copy to each that has its experts. If
    the model has routing groups, these are among the places of a token's groups (arXiv 2412.19437)."""
    count, groups, chosen = placed.model.experts_per_token, placed.model.expert_groups, placed.model.groups_per_token
    if placed.job.dispatcher != "deepep":
        return count * (places - 1) / places
    reached = places * chosen / groups  # a group fills places / groups places
    if places < groups:  # a place has groups / places groups, of which any is chosen
        reached = places * (1 - math.comb(groups - groups // places, chosen) / math.comb(groups, chosen))
    return reached * (1 - (1 - 1 / reached) ** count) * (places - 1) / places


def sharded_s(placed: PlacedJob, weights: Weights, element_bytes: int) -> float:
    """Estimate the time, in seconds, to gather sharded weights, or to reduce their gradients over shards."""
    shared_s = all_gather_s(placed.cluster, placed.shard_group, element_bytes * weights.shared)
    if not weights.experts:
        return shared_s
    return shared_s + all_gather_s(placed.cluster, placed.expert_shard_group, element_bytes * weights.experts)


def average_s(placed: PlacedJob, weights: Weights) -> float:
    """Estimate the time, in seconds, to average the gradients that a rank owns over the model's replicas."""
    owned_bytes = divided_weights(placed, weights) * placed.gradient_bytes
    return all_reduce_s(placed.cluster, placed.replicate_group, owned_bytes)


def copies_sum_s(placed: PlacedJob, weights: Weights, *, per_step: bool) -> float:
    """Estimate the time, in seconds, to add up the gradients of experts that several ranks of a replica hold. They run
    in each micro-batch if FSDP manages the experts and reduces in each; otherwise once per step."""
    layout = placed.layout
    is_repeated = layout.ep == layout.pp == 1 and layout.reshard_after_forward and placed.is_sharded
    if is_repeated == per_step or not weights.experts:
        return 0.0
    element_bytes = placed.element_bytes if is_repeated else placed.gradient_bytes
    return all_reduce_s(placed.cluster, placed.expert_copies_group, weights.experts * element_bytes)


def pipeline_send_s(placed: PlacedJob) -> float:
    """Estimate the time, in seconds, to send a micro-batch's residual stream to the next stage.

    In Megatron-LM, each tensor-parallel rank sends only its part even without sequence parallelism, and the receivers
    gather the parts over NVLink (arXiv 2104.04473, section 4.1).
    """
    layout = placed.layout
    parts = layout.tp if placed.trainer.core == "megatron" else placed.residual_parts
    total_bytes = placed.tokens * placed.model.residual_features * placed.element_bytes / parts
    return send_s(placed.cluster, layout.tp * layout.cp * layout.dp, total_bytes)


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
    if placed.reduces_each:
        gathers = 2 - sums * keeps_weights(placed) if layout.reshard_after_forward else 1 - sums
        return gathers * gather + reduce + 3 * state * sums / ranks
    # Unsharded gradients are summed in the reduction's data type and reduced after the last micro-batch.
    added = 3 * ELEMENT if reduced == ELEMENT else 2 * reduced + ELEMENT
    return added * sums + (gather + reduce) / layout.microbatches


def host_copies_s(placed: PlacedJob, owned_weights: float) -> float:
    """Estimate how many seconds copying gradients to the host and weights back takes if the optimizer runs there."""
    return owned_weights * (2 + 2) / (HOST_LINK_GB_S * 1e9) if placed.layout.offload_optimizer else 0.0
