"""Seconds of collectives on a topology, by ring or tree."""

from __future__ import annotations

import math
from dataclasses import dataclass

from workloads.estimator.cluster import Cluster

# nccl-tests of large messages: all-gather reaches 350 to 370 of an H100's 450 GB/s, 230 to 235 of an A100's 300.
LINK_SHARE = 0.78
# 45 to 48 of a NIC's 50 GB/s (nccl-tests on eight NICs of 400 Gb/s a node).
NETWORK_SHARE = 0.9


@dataclass(frozen=True)
class Group:
    """Ranks of a collective: `ranks` of them, `stride` apart."""

    ranks: int
    stride: int = 1

    def ranks_per_domain(self, gpus_per_domain: int) -> int:
        return max(1, min(self.ranks, gpus_per_domain // self.stride))


def bandwidth_gb_s(cluster: Cluster, group: Group, link_share: float = LINK_SHARE) -> float:
    """Return the bandwidth of a ring, each way: of one GPU's links, or of all NICs that a group has in a domain.

    Rings of one group enter a domain over the NICs of all of its ranks there, and groups that share a domain have
    different ranks and so different NICs.
    """
    topology = cluster.topology
    local = group.ranks_per_domain(topology.gpus_per_domain)
    link = topology.link_gb_s * link_share
    if topology.wiring == "pairs" and local < topology.gpus_per_domain:
        link *= max(1, local - 1) / (topology.gpus_per_domain - 1)
    if local >= group.ranks:
        return link
    network = topology.network_gb_s * NETWORK_SHARE / topology.oversubscription
    return min(link, local * network) if local > 1 else network


def latency_s(cluster: Cluster, group: Group) -> float:
    """Return the latency of a ring all-gather or reduce-scatter."""
    topology = cluster.topology
    local = group.ranks_per_domain(topology.gpus_per_domain)
    domains = math.ceil(group.ranks / local)
    hops = (group.ranks - domains) * topology.link_latency_s
    return hops + (domains if domains > 1 else 0) * topology.network_latency_s


def all_gather_s(cluster: Cluster, group: Group, total_bytes: float, link_share: float = LINK_SHARE) -> float:
    """Return the seconds of a ring all-gather or reduce-scatter of `total_bytes`."""
    if group.ranks == 1:
        return 0.0
    share = (group.ranks - 1) / group.ranks
    return total_bytes * share / (bandwidth_gb_s(cluster, group, link_share) * 1e9) + latency_s(cluster, group)


def all_reduce_s(cluster: Cluster, group: Group, total_bytes: float, link_share: float = LINK_SHARE) -> float:
    """Return the seconds of an all-reduce: a ring, or a tree where its lower latency wins."""
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
    """Return the seconds of an all-to-all: a rank sends `sent_bytes`, `network_bytes` of them to other domains."""
    if group.ranks == 1:
        return 0.0
    topology = cluster.topology
    link_s = sent_bytes / (topology.link_gb_s * LINK_SHARE * 1e9)
    network_gb_s = topology.network_gb_s * NETWORK_SHARE / topology.oversubscription
    domains = math.ceil(group.ranks / group.ranks_per_domain(topology.gpus_per_domain))
    network_s = network_bytes / (network_gb_s * 1e9) if domains > 1 else 0.0
    latency = topology.link_latency_s + (topology.network_latency_s if domains > 1 else 0.0)
    return max(link_s, network_s) + latency


def send_s(cluster: Cluster, stride: int, total_bytes: float) -> float:
    """Return the seconds of sending to the rank `stride` away."""
    topology = cluster.topology
    if stride < topology.gpus_per_domain:
        share = 1 / (topology.gpus_per_domain - 1) if topology.wiring == "pairs" else 1.0
        return total_bytes / (topology.link_gb_s * LINK_SHARE * share * 1e9) + topology.link_latency_s
    network_gb_s = topology.network_gb_s * NETWORK_SHARE / topology.oversubscription
    return total_bytes / (network_gb_s * 1e9) + topology.network_latency_s
