"""What is known about the devices of a trial before it runs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from sweeper.config.catalogue import catalogue
from sweeper.config.hardware import Target
from sweeper.config.schema import Hardware
from workloads.api import host
from workloads.api.contract import Machine
from workloads.estimator.cluster import UNKNOWN_CLUSTER, Cluster, Device, Topology
from workloads.estimator.search import USABLE_MEMORY
from workloads.estimator.topologies import measured_tflops, power_headroom


def build_machine(target: Target, world_size: int, topology: Topology, achieved_tflops: Mapping[str, float]) -> Machine:
    """Return what is known about the devices of a trial of `world_size` ranks.

    Args:
        topology: of the cluster; of a domain the GPUs of a trial count alone.
        achieved_tflops: measured rates of one rank's matrix products by data type.
    """
    hardware = target.hardware
    ranks_per_node = target.ranks_per_node(world_size)
    if target.is_gpu:
        memory_gib = USABLE_MEMORY * hardware.memory_gib if hardware.memory_gib else None
    else:  # ranks on one processor share its memory
        memory_gib = USABLE_MEMORY * (target.least_memory_gib() or host.memory_bytes() / 2**30) / ranks_per_node
    topology = _among_ranks(topology, target, world_size) if target.is_gpu else UNKNOWN_CLUSTER.topology
    return Machine(
        kind=hardware.kind,
        architecture=target.architecture or "",
        world_size=world_size,
        ranks_per_node=ranks_per_node,
        memory_gib=memory_gib,
        cluster=Cluster(
            _device(hardware, target.architecture or "", achieved_tflops),
            topology if target.is_gpu else replace(topology, gpus_per_domain=ranks_per_node),
            world_size,
        ),
    )


def on_nodes(machine: Machine, devices: int, gpus_per_node: int) -> Machine:
    """Return the machine with so many of its devices, which fill nodes."""
    ranks_per_node = min(devices, gpus_per_node)
    topology = machine.cluster.topology
    domain = max(topology.gpus_per_domain, ranks_per_node)  # it may span nodes
    link_gb_s = topology.link_gb_s
    if topology.wiring == "pairs" and topology.gpus_per_domain > 1:  # each further GPU of a node adds a link
        link_gb_s *= (domain - 1) / (topology.gpus_per_domain - 1)
    topology = replace(topology, gpus_per_domain=domain, link_gb_s=link_gb_s)
    cluster = replace(machine.cluster, gpus=devices, topology=topology)
    return replace(machine, world_size=devices, ranks_per_node=ranks_per_node, cluster=cluster)


def _device(hardware: Hardware, architecture: str, achieved_tflops: Mapping[str, float]) -> Device:
    """Return the planner's view of a device, of which the catalogue may lack everything."""
    peaks = {dtype: peak for dtype, peak in hardware.dense_peak_tflops.items() if peak}
    return Device(
        name=hardware.name,
        peak_tflops=peaks,
        memory_gib=hardware.memory_gib or 0.0,
        memory_gb_s=1e3 * hardware.bandwidth_tb_s if hardware.bandwidth_tb_s else math.inf,
        power_w=hardware.power_w,
        sustained_tflops=_sustained_tflops(hardware, achieved_tflops),
        architecture=architecture,
        power_headroom=power_headroom(hardware.name) if _is_whole(hardware) else 1.0,
    )


def _sustained_tflops(hardware: Hardware, achieved_tflops: Mapping[str, float]) -> Mapping[str, float]:
    """Return the rates of a device's products: those in training, else achieved ones, else a share of the peaks.

    A search for the highest rate measures short runs, which a power cap limits less than training.
    """
    if not hardware.dense_peak_tflops:
        slowest = min(achieved_tflops.values(), default=0.0)
        assumed = {dtype: slowest or rate for dtype, rate in UNKNOWN_CLUSTER.device.sustained_tflops.items()}
        return assumed | dict(achieved_tflops)
    bf16 = hardware.dense_peak_tflops.get("bf16")
    assumed = {"bf16": hardware.achieved_share * bf16} if bf16 else {}
    return assumed | dict(achieved_tflops) | (measured_tflops(hardware.name) if _is_whole(hardware) else {})


def _is_whole(hardware: Hardware) -> bool:
    """Return whether a device is a whole GPU, and not a part of one in a partition mode."""
    entry = catalogue().get(hardware.name)
    return entry is not None and entry.dense_peak_tflops == hardware.dense_peak_tflops


def _among_ranks(topology: Topology, target: Target, world_size: int) -> Topology:
    """Return the topology among the ranks of a trial, whose domains have its ranks of a node, or of several nodes.

    Of GPUs with links in pairs, those among a trial's ranks on a node count alone: of the seven links of an MI300X a
    group of two has one, a group of eight all.
    """
    spans_nodes = topology.gpus_per_domain > max(node.gpus for node in target.nodes)
    ranks = min(topology.gpus_per_domain, world_size) if spans_nodes else target.ranks_per_node(world_size)
    if topology.wiring != "pairs":
        return replace(topology, gpus_per_domain=ranks)
    peers = target.hardware.link_peers or max(topology.gpus_per_domain - 1, 1)
    share = min(max(ranks - 1, 1) / peers, 1.0)
    return replace(topology, gpus_per_domain=ranks, link_gb_s=topology.link_gb_s * share)
