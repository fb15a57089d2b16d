"""The planner's clusters from the catalogue of GPUs and topologies."""

from __future__ import annotations

from pathlib import Path

import pytest

from sweeper.common.errors import UserInputError
from sweeper.config.catalogue import catalogue
from sweeper.planning.clusters import build_cluster, build_device
from workloads.planner.topologies import known_topologies

OWN = "gpus_per_domain: 4\nwiring: switch\nlink_gb_s: 450\nnetwork_gb_s: 25\n"


def test_a_cluster_has_the_catalogue_s_gpu_and_the_table_s_network() -> None:
    cluster = build_cluster("h100_96gb", "h100_400g", 64)
    assert (cluster.gpus, cluster.device.power_w, cluster.device.memory_gb_s) == (64, 500, 2400)
    assert cluster.topology.network_gb_s == 50
    at_700_w = build_cluster("h100", "dgx_h100", 8)
    assert cluster.device.sustained_tflops["bf16"] < at_700_w.device.sustained_tflops["bf16"]


@pytest.mark.parametrize("name", [name for name, entry in catalogue().items() if entry.bandwidth_tb_s])
def test_every_gpu_of_the_catalogue_has_rates_below_its_peaks(name: str) -> None:
    device = build_device(catalogue()[name])
    assert all(0 < rate < device.peak_tflops[dtype] for dtype, rate in device.sustained_tflops.items())
    assert device.memory_gb_s > 0 and device.memory_gib > 0


def test_a_gpu_without_published_figures_is_refused() -> None:
    with pytest.raises(UserInputError, match="mi308x cannot be planned: no peaks, memory, bandwidth"):
        build_cluster("mi308x", "mi300x_8", 8)


def test_a_topology_of_one_s_own_is_a_file(tmp_path: Path) -> None:
    path = tmp_path / "lab.yaml"
    path.write_text(OWN)
    topology = build_cluster("h100", str(path), 16).topology
    assert (topology.name, topology.gpus_per_domain, topology.network_gb_s) == ("lab", 4, 25)


@pytest.mark.parametrize(
    ("hardware", "topology", "message"),
    [
        ("h900", "dgx_h100", "unknown hardware 'h900'. Available: a100"),
        ("h100", "dgx_h10", "Did you mean dgx_h100"),
        ("h100", "missing.yaml", "cannot be read"),
    ],
)
def test_what_is_unknown_is_named(hardware: str, topology: str, message: str) -> None:
    with pytest.raises(UserInputError, match=message):
        build_cluster(hardware, topology, 8)


@pytest.mark.parametrize("line", ["links: 3", "wiring: ring", "link_gb_s: 0"])
def test_an_invalid_file_names_its_key(line: str, tmp_path: Path) -> None:
    path = tmp_path / "lab.yaml"
    key = line.split(":")[0]
    path.write_text("".join(other for other in OWN.splitlines(True) if not other.startswith(key)) + line)
    with pytest.raises(UserInputError, match=f"lab: .*{key}"):
        build_cluster("h100", str(path), 8)


def test_topologies_have_links() -> None:
    assert {"dgx_h100", "h200_400g", "gb200_nvl72", "mi300x_8", "pcie_8"} <= set(known_topologies())
