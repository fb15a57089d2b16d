"""The planner's clusters from the catalogue of GPUs and topologies."""

import re
from pathlib import Path
from typing import Any

import pytest

from sweeper.config.catalogue import catalogue
from sweeper.config.schema import TopologySection
from sweeper.preflight.clusters import (
    build_cluster,
    build_device,
    build_machine,
    choose_topology,
    find_topology,
    known_topologies,
)
from sweeper.preflight.devices import planned_target
from workloads.api.errors import UserInputError

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
        ("h900", "dgx_h100", "unknown hardware 'h900'. Did you mean h"),
        ("h100", "dgx_h10", "Did you mean dgx_h100"),
        ("h100", "missing.yaml", "cannot be read"),
    ],
)
def test_what_is_unknown_is_named(hardware: str, topology: str, message: str) -> None:
    with pytest.raises(UserInputError, match=message):
        build_cluster(hardware, topology, 8)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("link_gbs: 3", "link_gbs: unknown key. Did you mean link_gb_s?"),
        ("nics: 8", "nics: unknown key. Available: gpus_per_domain, "),
        ("wiring: swich", "wiring=swich: must be one of switch, pairs, host. Did you mean switch?"),
        ("wiring: ring", "wiring=ring: must be one of switch, pairs, host"),
        ("link_gb_s: 0", "link_gb_s=0.0: must be at least 0.001"),
        ("link_gb_s: .nan", "link_gb_s=nan: must be finite"),
        ("link_gb_s: true", "link_gb_s=true: must be a number"),
        ("link_gb_s: fast", "link_gb_s=fast: must be a number"),
        ("network_gb_s: null", "network_gb_s=null: must be a number"),
        ("gpus_per_domain: 2.5", "gpus_per_domain=2.5: must be an integer"),
        ("oversubscription: 0.5", "oversubscription=0.5: must be at least 1"),
    ],
)
def test_an_invalid_file_names_its_key(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "lab.yaml"
    key = line.split(":")[0]
    path.write_text("".join(other for other in OWN.splitlines(True) if not other.startswith(key)) + line)
    with pytest.raises(UserInputError, match=f"topology lab: {message}"):
        build_cluster("h100", str(path), 8)


@pytest.mark.parametrize(("content", "reason"), [(b"a: [\n", "line 2: "), (b"\xff\xfe\x00\x01", "'utf-8' codec")])
def test_a_file_that_is_not_yaml_is_named(content: bytes, reason: str, tmp_path: Path) -> None:
    (tmp_path / "lab.yaml").write_bytes(content)
    with pytest.raises(UserInputError, match=f"topology .*lab.yaml cannot be read: {reason}"):
        build_cluster("h100", str(tmp_path / "lab.yaml"), 8)


def test_a_topology_without_links_is_refused_with_what_is_allowed(tmp_path: Path) -> None:
    path = tmp_path / "lab.yaml"
    path.write_text("gpus_per_domain: 8\nwiring: switch\nnetwork_gb_s: 25\n")
    with pytest.raises(UserInputError, match=r"topology lab: link_gb_s: required \(a number\)"):
        build_cluster("h100", str(path), 8)


def test_a_sweep_s_topology_is_a_name_a_file_or_the_devices_nodes(tmp_path: Path) -> None:
    h100 = catalogue()["h100"]
    automatic = choose_topology(TopologySection(network_gb_s=12.5), h100, 4, None)
    assert (automatic.gpus_per_domain, automatic.link_gb_s, automatic.network_gb_s) == (4, 450, 12.5)
    named = TopologySection("mine", 72, "switch", link_gb_s=900, network_gb_s=50)
    assert choose_topology(named, h100, 4, None).gpus_per_domain == 72
    path = tmp_path / "lab.yaml"
    path.write_text(OWN)
    own = choose_topology(TopologySection(file=str(path), link_gb_s=300), h100, 8, None)
    assert (own.name, own.gpus_per_domain, own.link_gb_s, own.network_gb_s) == ("lab", 4, 300, 25)
    with pytest.raises(UserInputError, match=r"topology mine: gpus_per_domain: required \(an integer\)"):
        choose_topology(TopologySection("mine", network_gb_s=50), h100, 8, None)


def test_a_domain_of_several_nodes_holds_ranks_of_several_nodes() -> None:
    """Of a GB200 NVL72 a trial of 16 GPUs has all in one domain, and of nodes of eight half of them."""
    target = planned_target(catalogue()["h200"], 16)
    for name, ranks in (("gb200_nvl72", 16), ("h200_400g", 8)):
        assert build_machine(target, 16, find_topology(name), {}).cluster.topology.gpus_per_domain == ranks


def test_a_command_takes_a_topology_by_name_or_file_and_refuses_what_it_cannot_read(
    run_cli: Any, tmp_path: Path
) -> None:
    (tmp_path / "lab.yaml").write_text(OWN.replace("25", "3"))
    words = ["workload=parallel", "hardware=h100", "gpus=16", f"dir={tmp_path}", "plan=true", "projection.nodes=4"]
    words += ["space.dp_replicate=2", "space.dp_shard=8", "space.micro_batch=1", "space.checkpointing=full"]
    result = run_cli(*words, f"topology={tmp_path / 'lab.yaml'}")
    assert result.code == 0 and "replicas average gradients over 3 GB/s a device" in result.out, result.err
    result = run_cli(*words, "topology=mi300x_8", "topology.network_gb_s=7")
    text = " ".join(result.out.split())
    assert "over 7 GB/s a device, 64 GB/s to each of 7 other devices" in text, result.out
    (tmp_path / "alone.yaml").write_text(OWN.replace("switch", "pairs").replace(": 4", ": 1"))
    alone = run_cli("workload=matmul", "hardware=h100", "plan=true", f"topology={tmp_path / 'alone.yaml'}")
    assert alone.code == 0, alone.err
    for word, message in (
        ("topology=dgx_h10", "topology=dgx_h10: unknown topology 'dgx_h10'. Did you mean dgx_h100.* Available: "),
        ("topology=no.yaml", "topology no.yaml cannot be read"),
        ("topology.wiring=ring", "topology.wiring=ring: must be"),
    ):
        refused = run_cli(*words, word)
        assert refused.code == 2 and re.search(message, refused.err), refused.err


@pytest.mark.parametrize("name", known_topologies())
def test_the_file_of_a_topology_has_its_name(name: str) -> None:
    assert known_topologies()[name].name == name


def test_topologies_have_links() -> None:
    assert {"dgx_h100", "h200_400g", "gb200_nvl72", "mi300x_8", "pcie_8"} <= set(known_topologies())
