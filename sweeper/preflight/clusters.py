"""The planner's clusters, from the catalogue of GPUs and a topology by name or from a file."""

from __future__ import annotations

from dataclasses import asdict, fields, replace

from sweeper.config.catalogue import catalogue
from sweeper.config.schema import Hardware, TopologySection
from sweeper.config.topologies import AUTO, find_topology, read_topology, topology_of
from sweeper.preflight.calibration import CalibrationFile, calibrate_device
from workloads.api.errors import UserInputError
from workloads.estimator.cluster import Cluster, Device, Topology, Wiring
from workloads.estimator.topologies import measured_tflops, power_headroom

NODE_GPUS = 8  # of a node, where no topology is given
NETWORK_GB_S = 50.0  # of one GPU: a NIC of 400 Gb/s each
TOPOLOGY_KEYS = {item.name for item in fields(Topology)} - {"name"}
MAX_HOST_GB_S = 64.0  # PCIe 5.0 x16: a GPU without faster links reaches others through the processors


def build_cluster(
    hardware: str, topology: str | None, gpus: int, calibration: CalibrationFile | None = None
) -> Cluster:
    """Return so many GPUs of a kind on a topology: a name of `conf/topology`, or the path of a YAML file.

    Without a topology it is the one that was measured with the calibration, else nodes of eight with the GPU's own
    links and a NIC of 400 Gb/s for each GPU.

    Raises:
        UserInputError: the catalogue has no such GPU, or the topology is not known or not valid.
    """
    if hardware not in catalogue():
        raise UserInputError(f"unknown hardware '{hardware}'. Available: {', '.join(catalogue())}")
    network = find_topology(topology) if topology else _assumed_topology(catalogue()[hardware], calibration)
    device = build_device(catalogue()[hardware])
    return Cluster(calibrate_device(device, calibration.rates) if calibration else device, network, gpus)


def choose_topology(
    section: TopologySection, hardware: Hardware, gpus_per_node: int, calibration: CalibrationFile | None
) -> Topology:
    """Return the topology of a sweep's configuration; keys that are set replace those of a file or of `auto`.

    Of `auto` without a measured topology, the nodes of the cluster are the domains.

    Raises:
        UserInputError: a key is missing, or a file is not valid.
    """
    given = {name: value for name, value in asdict(section).items() if value is not None and name in TOPOLOGY_KEYS}
    if section.file is None and section.name != AUTO:
        return topology_of({"name": section.name, **given})
    if section.file:
        return replace(find_topology(section.file), **given)
    assumed = _assumed_topology(hardware, calibration)
    if not calibration or not calibration.topology_path.exists():
        assumed = replace(assumed, gpus_per_domain=gpus_per_node)
    return replace(assumed, **given)


def _assumed_topology(hardware: Hardware, calibration: CalibrationFile | None) -> Topology:
    """Return the measured topology, else the default one."""
    if calibration and calibration.topology_path.exists():
        return read_topology(calibration.topology_path)
    return default_topology(hardware)


def default_topology(hardware: Hardware) -> Topology:
    """Return nodes of eight with the links in the GPU's file of the catalogue."""
    link_gb_s = hardware.link_gb_s or MAX_HOST_GB_S / 2
    switch: Wiring = "switch" if link_gb_s > MAX_HOST_GB_S else "host"
    return Topology(
        name=f"nodes of {NODE_GPUS}",
        gpus_per_domain=NODE_GPUS,
        wiring="pairs" if hardware.link_peers else switch,
        link_gb_s=link_gb_s,
        network_gb_s=NETWORK_GB_S,
    )


def build_device(hardware: Hardware) -> Device:
    """Return the planner's view of a GPU of the catalogue.

    Raises:
        UserInputError: the catalogue has no peaks, memory or bandwidth of it, since none are published.
    """
    figures = {
        "peaks": hardware.dense_peak_tflops,
        "memory": hardware.memory_gib,
        "bandwidth": hardware.bandwidth_tb_s,
    }
    missing = [name for name, value in figures.items() if not value]
    if missing:
        raise UserInputError(f"hardware {hardware.name} cannot be planned: no {', '.join(missing)} in conf/hardware")
    peaks = {name: peak for name, peak in hardware.dense_peak_tflops.items() if peak}
    rates = measured_tflops(hardware.name)
    if not rates and hardware.achieved_share and "bf16" in peaks:
        rates = {"bf16": hardware.achieved_share * peaks["bf16"]}
    return Device(
        name=hardware.name,
        peak_tflops=peaks,
        memory_gib=hardware.memory_gib or 0.0,
        memory_gb_s=(hardware.bandwidth_tb_s or 0.0) * 1e3,
        power_w=hardware.power_w,
        sustained_tflops=rates,
        architecture=hardware.architecture or "",
        power_headroom=power_headroom(hardware.name),
    )
