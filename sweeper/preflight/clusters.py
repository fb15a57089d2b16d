"""Build the planner's model of devices: catalog GPUs connected by a topology, and the devices of a trial."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from sweeper.config.catalogue import catalogue
from sweeper.config.hardware import Target
from sweeper.config.resolution import CONF
from sweeper.config.schema import Hardware, TopologySection
from sweeper.preflight.calibration import CalibrationFile, calibrate_device
from workloads.api import host
from workloads.api.contract import Machine
from workloads.api.errors import UserInputError, first_line
from workloads.api.validation import build, check_known
from workloads.hardware.cluster import (
    UNKNOWN_CLUSTER,
    USABLE_MEMORY,
    Cluster,
    Device,
    Topology,
    Wiring,
    measured_tflops,
    power_headroom,
)

AUTO = "auto"
NODE_GPUS = 8  # GPUs per node if no topology is given
NETWORK_GB_S = 50.0  # per GPU: one 400 Gb/s NIC for each GPU
TOPOLOGY_KEYS = {item.name for item in fields(Topology)} - {"name"}
MAX_HOST_GB_S = 64.0  # PCIe 5.0 x16: without faster links, GPUs communicate through the CPUs


def build_cluster(
    hardware: str, topology: str | None, gpus: int, calibration: CalibrationFile | None = None
) -> Cluster:
    """Return a cluster of this many GPUs. `topology` is a name in `conf/topology` or the path of a YAML file.

    Without `topology`, use the topology measured with the calibration, or else `default_topology`.

    Raises UserInputError if the catalog does not have this GPU, or if the topology is unknown or invalid.
    """
    check_known(hardware, catalogue(), f"unknown hardware '{hardware}'")
    network = find_topology(topology) if topology else _assumed_topology(catalogue()[hardware], calibration)
    device = build_device(catalogue()[hardware])
    return Cluster(calibrate_device(device, calibration.rates) if calibration else device, network, gpus)


@cache
def known_topologies() -> dict[str, Topology]:
    paths = sorted((CONF / "topology").glob("*.yaml"))
    return {path.stem: _read_topology(path) for path in paths if path.stem != AUTO}


def find_topology(name: str) -> Topology:
    """Return the topology with this name or in this YAML file. Raises UserInputError if it is missing or invalid."""
    if name.endswith((".yaml", ".yml")):
        return _read_topology(Path(name).expanduser())
    check_known(name, known_topologies(), f"unknown topology '{name}': must be a name or a YAML file")
    return known_topologies()[name]


def _read_topology(path: Path) -> Topology:
    try:
        values: Any = OmegaConf.to_container(OmegaConf.load(path))
    except OSError as error:
        raise UserInputError(f"topology {path} cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, YAMLError, OmegaConfBaseException) as error:
        mark = getattr(error, "problem_mark", None)
        place = f"line {mark.line + 1}: " if mark else ""
        raise UserInputError(f"topology {path} cannot be read: {place}{first_line(error)}") from error
    if not isinstance(values, dict):
        raise UserInputError(f"topology {path} has no keys")
    values = {"name": path.stem} | {str(key): value for key, value in values.items() if key != "source"}
    return build(Topology, values, f"topology {values['name']}: ")


def choose_topology(
    section: TopologySection, hardware: Hardware, gpus_per_node: int, calibration: CalibrationFile | None
) -> Topology:
    """Return a sweep's topology. Keys that are set override those of a file or, with `auto`, of the cluster's nodes."""
    given = {name: value for name, value in asdict(section).items() if value is not None and name in TOPOLOGY_KEYS}
    if section.file is None and section.name != AUTO:
        return build(Topology, {"name": section.name, **given}, f"topology {section.name}: ")
    if section.file:
        return replace(find_topology(section.file), **given)
    assumed = _assumed_topology(hardware, calibration)
    if not calibration or not calibration.topology_path.exists():
        assumed = replace(assumed, gpus_per_domain=gpus_per_node)
    return replace(assumed, **given)


def _assumed_topology(hardware: Hardware, calibration: CalibrationFile | None) -> Topology:
    if calibration and calibration.topology_path.exists():
        return _read_topology(calibration.topology_path)
    return default_topology(hardware)


def default_topology(hardware: Hardware) -> Topology:
    """Return the GPU's rack if there is one, else nodes of eight with the GPU's links and a 400 Gb/s NIC per GPU."""
    racks = (topology for topology in known_topologies().values() if topology.gpus_per_domain > NODE_GPUS)
    if rack := next((rack for rack in racks if rack.name.startswith(f"{hardware.name}_")), None):
        return rack
    link_gb_s = hardware.link_gb_s or MAX_HOST_GB_S / 2
    switch: Wiring = "switch" if link_gb_s > MAX_HOST_GB_S else "host"
    return Topology(
        name=f"nodes of {NODE_GPUS}",
        gpus_per_domain=NODE_GPUS,
        wiring="pairs" if hardware.link_peers else switch,
        link_gb_s=link_gb_s,
        network_gb_s=NETWORK_GB_S,
    )


def list_mismatches(cluster: Cluster) -> Iterator[str]:
    """Yield what the cluster's topology has that its GPU has not: larger domains, faster links or another wiring. Any
    GPU can communicate through the CPUs."""
    given, hardware = cluster.topology, catalogue()[cluster.device.name]
    own, most_gb_s = default_topology(hardware), hardware.link_gb_s or MAX_HOST_GB_S
    if given.gpus_per_domain > own.gpus_per_domain:
        yield f"{given.name} has domains of {given.gpus_per_domain} GPUs, {hardware.name} of {own.gpus_per_domain}"
    if given.link_gb_s > most_gb_s:
        yield f"{given.name} has {given.link_gb_s:g} GB/s for each GPU, {hardware.name} at most {most_gb_s:g}"
    if given.wiring not in (own.wiring, "host"):
        yield f"{given.name} has wiring {given.wiring}, {hardware.name} has wiring {own.wiring}"


def build_device(hardware: Hardware) -> Device:
    """Return the planner's model of a GPU. Raises UserInputError if the catalog lacks peaks, memory or bandwidth."""
    peaks, memory, bandwidth = hardware.dense_peak_tflops, hardware.memory_gib, hardware.bandwidth_tb_s
    figures = {"peaks": peaks, "memory": memory, "bandwidth": bandwidth}
    if missing := [name for name, value in figures.items() if not value]:
        raise UserInputError(f"hardware {hardware.name} cannot be planned: no {', '.join(missing)} in conf/hardware")
    rates = measured_tflops(hardware.name) or _assumed_tflops(hardware)
    return _device(hardware, hardware.architecture or "", rates, power_headroom(hardware.name))


def find_device(hardware: Hardware) -> Device | None:
    """Return the planner's model of a GPU, or None if plans do not support the device."""
    try:
        return build_device(hardware)
    except UserInputError:
        return None


def _device(hardware: Hardware, architecture: str, sustained: Mapping[str, float], headroom: float) -> Device:
    return Device(
        name=hardware.name,
        peak_tflops={dtype: peak for dtype, peak in hardware.dense_peak_tflops.items() if peak},
        memory_gib=hardware.memory_gib or 0.0,
        memory_gb_s=1e3 * hardware.bandwidth_tb_s if hardware.bandwidth_tb_s else math.inf,
        power_w=hardware.power_w,
        sustained_tflops=sustained,
        architecture=architecture,
        power_headroom=headroom,
    )


def _assumed_tflops(hardware: Hardware) -> dict[str, float]:
    peaks = hardware.dense_peak_tflops
    dtype = "bf16" if peaks.get("bf16") else "fp16"
    return {dtype: hardware.achieved_share * peaks[dtype]} if peaks.get(dtype) else {}


def build_machine(target: Target, world_size: int, topology: Topology, achieved_tflops: Mapping[str, float]) -> Machine:
    """Return the known properties of a trial's devices. `achieved_tflops` contains a rank's measured rates by dtype."""
    hardware, architecture = target.hardware, target.architecture or ""
    ranks_per_node = target.ranks_per_node(world_size)
    if target.is_gpu:
        memory_gib = USABLE_MEMORY * hardware.memory_gib if hardware.memory_gib else None
        topology = _among_ranks(topology, target, world_size)
    else:  # ranks on one CPU share its memory
        memory_gib = USABLE_MEMORY * (target.least_memory_gib() or host.memory_bytes() / 2**30) / ranks_per_node
        topology = replace(UNKNOWN_CLUSTER.topology, gpus_per_domain=ranks_per_node)
    entry = catalogue().get(hardware.name)
    is_whole = entry is not None and entry.dense_peak_tflops == hardware.dense_peak_tflops  # not a partition
    # Use rates measured in training, else achieved rates, else a share of the peaks. Achieved rates come from searches
    # for the highest rate, which use short runs. A power cap limits short runs less than training.
    if hardware.dense_peak_tflops:
        rates = _assumed_tflops(hardware) | dict(achieved_tflops)
        rates |= measured_tflops(hardware.name) if is_whole else {}
    else:
        slowest = min(achieved_tflops.values(), default=0.0)
        rates = {dtype: slowest or rate for dtype, rate in UNKNOWN_CLUSTER.device.sustained_tflops.items()}
        rates |= achieved_tflops
    device = _device(hardware, architecture, rates, power_headroom(hardware.name) if is_whole else 1.0)
    cluster = Cluster(device, topology, world_size)
    return Machine(hardware.kind, architecture, world_size, ranks_per_node, memory_gib, cluster)


def on_nodes(machine: Machine, devices: int, gpus_per_node: int) -> Machine:
    """Return the machine scaled to this many devices, on full nodes."""
    ranks_per_node = min(devices, gpus_per_node)
    topology = machine.cluster.topology
    domain = max(topology.gpus_per_domain, ranks_per_node)  # a domain may span nodes
    link_gb_s = topology.link_gb_s
    if topology.wiring == "pairs" and topology.gpus_per_domain > 1:  # each additional GPU adds a link to every GPU
        link_gb_s *= (domain - 1) / (topology.gpus_per_domain - 1)
    topology = replace(topology, gpus_per_domain=domain, link_gb_s=link_gb_s)
    cluster = replace(machine.cluster, gpus=devices, topology=topology)
    return replace(machine, world_size=devices, ranks_per_node=ranks_per_node, cluster=cluster)


def _among_ranks(topology: Topology, target: Target, world_size: int) -> Topology:
    """Return the topology between the ranks of a trial. A domain contains the trial's ranks on one or several nodes.
    Pairwise links count only between these ranks. An MI300X uses one of its seven links in a group of two, and all of
    them in a group of eight."""
    spans_nodes = topology.gpus_per_domain > max(node.gpus for node in target.nodes)
    ranks = min(topology.gpus_per_domain, world_size) if spans_nodes else target.ranks_per_node(world_size)
    if topology.wiring != "pairs":
        return replace(topology, gpus_per_domain=ranks)
    peers = target.hardware.link_peers or max(topology.gpus_per_domain - 1, 1)
    share = min(max(ranks - 1, 1) / peers, 1.0)
    return replace(topology, gpus_per_domain=ranks, link_gb_s=topology.link_gb_s * share)
