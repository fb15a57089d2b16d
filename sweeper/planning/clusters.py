"""The planner's clusters, from the catalogue of GPUs and a topology by name or from a file."""

from __future__ import annotations

from pathlib import Path

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from sweeper.common.errors import UserInputError
from sweeper.config.catalogue import catalogue
from sweeper.config.schema import Hardware
from sweeper.planning.calibration import CalibrationFile, calibrate_device
from workloads.planner.cluster import Cluster, Device, Topology, Wiring
from workloads.planner.topologies import build_topology, find_topology, measured_tflops, power_headroom

NODE_GPUS = 8  # of a node, where no topology is given
NETWORK_GB_S = 50.0  # of one GPU: a NIC of 400 Gb/s each
MAX_HOST_GB_S = 64.0  # PCIe 5.0 x16: a GPU without faster links reaches others through the processors


def build_cluster(
    hardware: str, topology: str | None, gpus: int, calibration: CalibrationFile | None = None
) -> Cluster:
    """Return so many GPUs of a kind on a topology: a name of the planner's table, or the path of a YAML file.

    Without a topology it is the one that was measured with the calibration, else nodes of eight with the GPU's own
    links and a NIC of 400 Gb/s for each GPU.

    Raises:
        UserInputError: the catalogue has no such GPU, or the topology is not known or not valid.
    """
    if hardware not in catalogue():
        raise UserInputError(f"unknown hardware '{hardware}'. Available: {', '.join(catalogue())}")
    if topology is None and calibration and calibration.topology_path.exists():
        topology = str(calibration.topology_path)
    try:
        network = _topology(catalogue()[hardware], topology)
    except ValueError as error:
        raise UserInputError(str(error)) from error
    device = build_device(catalogue()[hardware])
    return Cluster(calibrate_device(device, calibration.rates) if calibration else device, network, gpus)


def _topology(hardware: Hardware, topology: str | None) -> Topology:
    if topology is None:
        return default_topology(hardware)
    return read_topology(Path(topology)) if topology.endswith((".yaml", ".yml")) else find_topology(topology)


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


def read_topology(path: Path) -> Topology:
    """Return the topology of a YAML file with the keys of `Topology`.

    Raises:
        ValueError: the file cannot be read, or a key is missing or wrong.
    """
    try:
        values = OmegaConf.to_container(OmegaConf.load(path))
    except (OSError, YAMLError, OmegaConfBaseException) as error:
        raise ValueError(f"topology {path} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"topology {path} has no keys")
    return build_topology({"name": path.stem, **{str(key): value for key, value in values.items()}})
