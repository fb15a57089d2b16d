"""The catalogue, and choosing what a sweep runs on."""

import csv
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from sweeper.config.catalogue import catalogue, list_figures, use_config_dir
from sweeper.config.hardware import Node, hardware_of
from sweeper.config.resolution import CONF, resolve
from sweeper.config.schema import Hardware
from sweeper.config.space_checks import read_space, reserved_host_gib
from sweeper.preflight.devices import select_target
from tests.conftest import REPOSITORY, Workspace
from workloads.api.errors import UserInputError
from workloads.api.gpus import GpuIdentity

AUTO = Hardware(name="auto")
MAX_Q = "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition"
CPU_NODE = Node("a", cpus=8, cpu_name="EPYC")


def gpu_node(name: str, label: str, gpus: int = 8) -> Node:
    identities = tuple(GpuIdentity(number, "nvidia", name) for number in range(gpus)) if name else ()
    return Node("b", cpus=64, cpu_name="Xeon", gpus=gpus, accelerator=label, gpu_identities=identities)


def test_the_catalogue_reads_files_as_the_configuration_does() -> None:
    # Hydra composes `hardware=NAME` by OmegaConf, whose numbers differ from YAML's in some spellings (1e3).
    for name, entry in catalogue().items():
        composed = OmegaConf.to_container(OmegaConf.load(CONF / "hardware" / f"{name}.yaml"))
        assert isinstance(composed, dict)
        assert {key: getattr(entry, key) for key in composed if key != "environment"} == {
            key: value for key, value in composed.items() if key != "environment"
        }, name


@pytest.mark.parametrize(
    ("name", "label", "entry"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100", "a100"),
        ("NVIDIA A100-SXM4-40GB", "A100", "a100_40gb"),
        ("NVIDIA A100 80GB PCIe", "A100", "a100_pcie"),
        ("NVIDIA A100-PCIE-40GB", "A100", "a100_pcie_40gb"),
        ("NVIDIA A100-SXM-64GB", "A100", "nvidia_a100_sxm_64gb"),
        ("NVIDIA H100 80GB HBM3", "H100", "h100"),
        ("NVIDIA H100", "H100", "h100_96gb"),
        ("NVIDIA H100 PCIe", "H100", "h100_pcie"),
        ("NVIDIA H100 NVL", "H100", "h100_nvl"),
        ("NVIDIA H200", "H200", "h200"),
        ("NVIDIA GH200 480GB", "GH200", "gh200"),
        ("NVIDIA GH200 144G HBM3e", "GH200", "gh200_144gb"),
        ("NVIDIA B200", "B200", "b200"),
        ("NVIDIA GB200", "GB200", "gb200"),
        ("NVIDIA L4", "L4", "l4"),
        ("NVIDIA L40S", "L40S", "l40s"),
        ("NVIDIA GeForce RTX 4090", "GeForce-RTX-4090", "rtx4090"),
        ("NVIDIA GeForce RTX 4090 D", "GeForce-RTX-4090-D", "nvidia_geforce_rtx_4090_d"),
        ("NVIDIA B300 SXM6 AC", "B300", "b300"),
        ("NVIDIA GB300", "GB300", "gb300"),
        ("NVIDIA H20", "H20", "h20"),
        ("NVIDIA H20-3e", "H20", "nvidia_h20_3e"),
        ("NVIDIA H800", "H800", "h800"),
        ("NVIDIA H800 PCIe", "H800", "nvidia_h800_pcie"),
        ("Tesla V100-SXM2-32GB", "V100", "v100"),
        ("Tesla V100-SXM2-16GB", "V100", "v100_16gb"),
        ("Tesla V100-PCIE-32GB", "V100", "v100_pcie"),
        ("Tesla V100-PCIE-16GB", "V100", "v100_pcie_16gb"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX-PRO-6000", "rtx_pro_6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX-PRO-6000", "rtx_pro_6000_server"),
        (MAX_Q, "RTX-PRO-6000", MAX_Q.lower().replace(" ", "_").replace("-", "_")),
        ("NVIDIA GeForce RTX 5080", "GeForce-RTX-5080", "rtx5080"),
        ("NVIDIA GeForce RTX 5060 Ti", "GeForce-RTX-5060-Ti", "rtx5060ti"),
        ("NVIDIA RTX 4000 Ada Generation", "RTX-4000", "rtx4000ada"),
        ("NVIDIA RTX 4000 SFF Ada Generation", "RTX-4000", "rtx4000sffada"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX-6000", "rtx6000ada"),
        ("NVIDIA RTX A5000", "RTX-A5000", "rtxa5000"),
        ("NVIDIA RTX A5000 Laptop GPU", "RTX-A5000", "nvidia_rtx_a5000_laptop_gpu"),
        ("NVIDIA RTX A6000", "RTX-A6000", "rtxa6000"),
        ("NVIDIA A10G", "A10G", "a10g"),
        ("NVIDIA A10", "A10", "nvidia_a10"),
        ("Tesla T4", "T4", "t4"),
        ("NVIDIA T400", "T400", "nvidia_t400"),
        ("NVIDIA L40", "L40", "l40"),
        ("Aldebaran/MI200 [Instinct MI210]", "AMD-Instinct-MI210", "mi210"),
        ("Arcturus GL-XL [Instinct MI100]", "AMD-Instinct-MI100", "mi100"),
        ("", "AMD-Instinct-MI300X-OAM", "mi300x"),
        ("", "AMD-Instinct-MI300X-HF", "mi300x_hf"),
        ("AMD Instinct MI300X VF", "AMD-Instinct-MI300X-OAM", "mi300x"),
        ("AMD Instinct MI300X HF", "AMD-Instinct-MI300X-HF", "mi300x_hf"),
        ("", "AMD-Instinct-MI350X-OAM", "mi350x"),
        ("", "AMD-Instinct-MI355X-OAM", "mi355x"),
    ],
)
def test_a_gpu_is_recognized_by_the_names_of_its_driver_and_of_ray(name: str, label: str, entry: str) -> None:
    assert hardware_of(gpu_node(name, label)).name == entry
    matches = [kind.name for kind in catalogue().values() if any(re.search(p, name) for p in kind.device_names)]
    assert not name or matches == ([entry] if entry in catalogue() else [])


def instinct_node(device_id: str, name: str = "", **reported: Any) -> Node:
    """Eight GPUs as AMD SMI reports them."""
    gpus = tuple(GpuIdentity(n, "amd", name or "AMD GPU", device_id=device_id, **reported) for n in range(8))
    return Node("c", cpus=96, cpu_name="EPYC", gpus=8, gpu_identities=gpus)


# Device ids of ROCm/gpu-operator's gpu-nfd-default-rule.yaml and of vLLM's platforms/rocm.py.
@pytest.mark.parametrize(
    ("device_id", "entry"),
    [
        *(("0x738c", "mi100"), ("0x740f", "mi210"), ("0x7410", "mi210"), ("0x74bc", "mi308x")),
        *(("0x7408", "mi250x"), ("0x740c", "mi250x"), ("0x74a0", "mi300a"), ("0x74a1", "mi300x"), ("0x74b5", "mi300x")),
        *(("0x74a9", "mi300x_hf"), ("0x74bd", "mi300x_hf"), ("0x74a2", "mi308x"), ("0x74a5", "mi325x")),
        *(("0x74b9", "mi325x"), ("0x75a0", "mi350x"), ("0x75b0", "mi350x"), ("0x75a3", "mi355x"), ("0x75B3", "mi355x")),
    ],
)
def test_an_instinct_is_recognized_by_its_device_id_whatever_its_name(device_id: str, entry: str) -> None:
    for name in ("", "AMD Instinct MI300X", "AMD Radeon Graphics"):
        assert hardware_of(instinct_node(device_id, name)).name == entry


def test_an_amd_gpu_without_a_known_id_is_recognized_by_its_name_and_then_by_rays_label() -> None:
    virtual = instinct_node("0x7fff", "AMD Instinct MI325X VF")
    assert hardware_of(virtual).name == "mi325x"
    assert hardware_of(replace(virtual, accelerator="AMD-Instinct-MI300X-OAM")).name == "mi325x"
    nameless = replace(instinct_node(""), accelerator="AMD-Instinct-MI300X-OAM")
    assert hardware_of(nameless).name == "mi300x" and select_target(AUTO, [nameless], 8).hardware.name == "mi300x"
    assert hardware_of(instinct_node("0x7fff", "AMD Instinct MI999X")).dense_peak_tflops == {}


def test_forms_of_one_gpu_are_not_confused() -> None:
    """An H200 NVL has another power limit and other peaks than the SXM: no MFU is better than a wrong one."""
    unknown = hardware_of(gpu_node("NVIDIA H200 NVL", "H200"))
    assert unknown.name == "nvidia_h200_nvl"
    assert unknown.dense_peak_tflops == {}


def test_auto_takes_the_gpus_if_there_are_any() -> None:
    h200 = gpu_node("NVIDIA H200", "H200")
    assert select_target(AUTO, [CPU_NODE, h200], 1).hardware.name == "h200"
    assert select_target(AUTO, [CPU_NODE], 1).hardware.kind == "cpu"
    assert select_target(AUTO, [h200, h200], 1).devices == 16


def test_memory_that_other_processes_use_is_reported_and_that_of_a_display_is_not() -> None:
    node = replace(gpu_node("NVIDIA H200", "H200", gpus=2), gpus_used_gib=((2, 0.4), (3, 34.12)))
    (message,) = select_target(AUTO, [node], 1).describe_foreign_use()
    assert message.startswith("other processes use 34.1 GiB of GPU 3")
    assert select_target(Hardware(name="cpu", kind="cpu"), [node], 1).describe_foreign_use() == []


@pytest.mark.gpu
def test_a_sweep_reports_memory_that_other_processes_use_on_its_gpu(workspace: Workspace) -> None:
    import torch

    held = torch.empty(2 * 2**30, dtype=torch.uint8, device="cuda")
    torch.cuda.empty_cache()  # of what tests before have left
    held_gib = torch.cuda.memory_reserved() / 2**30
    shape = ("space.m=512", "space.n=512", "space.k=512", "search=grid", "finals.top=0")
    result = workspace.run("workload=matmul", *shape, "progress=never")
    number = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]  # the driver's, as the sweep says it
    match = re.search(rf"other processes use (\d+\.\d) GiB of GPU {number};", result.out + result.err)
    assert match, result.out + result.err
    assert held_gib <= float(match[1]) < held_gib + 3  # CUDA's own memory is seen too
    assert held.is_cuda


def test_auto_does_not_choose_between_kinds() -> None:
    with pytest.raises(UserInputError, match=r"hardware=h200\|mi300x"):
        select_target(AUTO, [gpu_node("NVIDIA H200", "H200"), gpu_node("", "AMD-Instinct-MI300X-OAM")], 1)


def test_a_sweep_takes_only_the_nodes_that_it_asked_for() -> None:
    nodes = [CPU_NODE, gpu_node("NVIDIA H200", "H200"), gpu_node("", "AMD-Instinct-MI300X-OAM", gpus=4)]
    target = select_target(catalogue()["mi300x"], nodes, 1)
    assert target.devices == 4
    assert target.count_gangs(2, None) == 2
    with pytest.raises(
        UserInputError, match=r"not in the cluster, which has 8 x NVIDIA H200 \(hardware=h200\), 4 x AMD"
    ):
        select_target(catalogue()["b200"], nodes, 1)
    with pytest.raises(UserInputError, match="gpus=8: the cluster has 4 GPUs"):
        select_target(catalogue()["mi300x"], nodes, 8)


def test_on_a_cpu_one_trial_runs_at_a_time_by_default() -> None:
    target = select_target(AUTO, [CPU_NODE], 1)
    assert target.count_gangs(1, None) == 1
    assert target.count_gangs(1, 4) == 4
    with pytest.raises(UserInputError, match="at most 8"):
        target.count_gangs(1, 9)


def test_no_process_is_given_more_cores_than_a_node_has() -> None:
    two = select_target(AUTO, [CPU_NODE, CPU_NODE], 1)
    assert [two.cores_per_rank(ranks) for ranks in (1, 2, 3, 4, 16)] == [8, 8, 4, 4, 1]


def test_the_catalogues_peaks_are_the_published_dense_ones() -> None:
    published = REPOSITORY.parent / "shared" / "reference" / "hardware.csv"
    if not published.exists():
        pytest.skip("the published table is not on this machine")
    names = {"h100": "H100-SXM", "h200": "H200-SXM", "mi300x": "MI300X", "b200": "B200", "a100": "A100-SXM4-80GB"}
    rows = {row["gpu"]: row for row in csv.DictReader(published.open())}
    for name, published_name in names.items():
        for dtype, peak in catalogue()[name].dense_peak_tflops.items():
            if (name, dtype) != ("b200", "fp32"):  # of a newer data sheet here
                assert peak == float(rows[published_name][dtype]), (name, dtype)


@pytest.mark.parametrize("name", sorted(catalogue()))
def test_an_entry_of_the_catalogue_is_consistent(name: str) -> None:
    hardware = catalogue()[name]
    others = [entry for entry in catalogue().values() if entry.name != name]
    assert not set(hardware.device_ids) & {device_id for entry in others for device_id in entry.device_ids}
    assert all(re.fullmatch("[0-9a-f]{4}", device_id) for device_id in hardware.device_ids)
    assert bool(hardware.device_ids) == (hardware.architecture or "").startswith("gfx")
    assert hardware.link_peers is None or hardware.link_gb_s


@pytest.mark.parametrize("name", sorted(catalogue()))
def test_each_figure_of_the_catalogue_has_a_source(name: str) -> None:
    hardware = catalogue()[name]
    assert list(hardware.sources) == [kind for kind, _, _ in list_figures(hardware)] and hardware.source is None
    for kind, text in hardware.sources.items():
        assert re.search(r"\b(20\d\d|JUN21|OCT25|undated|issue \d+|derived)\b|-r5| v[12]\b", text), (kind, text)


def test_no_device_is_assumed_to_exceed_the_fastest_published_product() -> None:
    # Means of 100 repeats with a cold cache (ml-engineering), and the fastest of 100 with a warm cache (gpu_benchmark).
    with Path(__file__).with_name("published_rates.csv").open() as file:
        rates = [(row["hardware"], float(row["tflops"])) for row in csv.DictReader(file) if row["dtype"] == "bf16"]
    assert len(rates) == 20
    for name in {name for name, _ in rates}:
        hardware = catalogue()[name]
        fastest = max(tflops for rated, tflops in rates if rated == name)
        assert hardware.achieved_share * hardware.dense_peak_tflops["bf16"] <= fastest, name


def test_with_whole_nodes_there_are_as_many_gangs_as_nodes_hold() -> None:
    nodes = tuple(Node(f"n{n}", 64, "cpu", gpus=8, accelerator="H200") for n in range(4))
    target = select_target(catalogue()["h200"], nodes, 1)
    assert target.count_gangs(1, None) == 32 and target.count_gangs(1, None, whole_nodes=True) == 4
    assert target.count_gangs(16, None, whole_nodes=True) == 2 == target.count_gangs(16, None)
    assert (target.cores_of_whole_nodes(1), target.cores_of_whole_nodes(8), target.cores_of_whole_nodes(16)) == (
        64,
        8,
        8,
    )
    with pytest.raises(UserInputError, match="at most 4 fit on 32 GPUs with exclusive=node"):
        target.count_gangs(1, 5, whole_nodes=True)


def test_host_memory_limits_the_number_of_gangs_on_a_node() -> None:
    nodes = tuple(Node(f"n{n}", 64, "cpu", gpus=8, accelerator="H200", memory_gib=1000.0 + n) for n in range(4))
    target = select_target(catalogue()["h200"], nodes, 1)
    assert [target.count_gangs(1, None, host_gib=gib) for gib in (0, 100, 300, 1000)] == [32, 32, 12, 4]
    assert target.count_gangs(2, None, host_gib=300) == 4  # three processes fit on a node, and no gang is split
    assert target.least_memory_gib() == 1000.0
    with pytest.raises(UserInputError, match="at most 12 fit on 32 GPUs with 300 GiB of memory each"):
        target.count_gangs(1, 13, host_gib=300)


def test_the_reserved_host_memory_is_the_largest_of_any_point() -> None:
    def reserved(*overrides: str) -> float:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            config = resolve(compose("config", overrides=["workload=probe", *overrides]))
        return reserved_host_gib(config, read_space(config, "gpu", None)[0])

    assert reserved() == 0
    assert reserved("++space.host_gib=3") == 3
    assert reserved('++space.host_gib="4,16,8"') == 16


H900 = """
defaults: [h100]
name: h900
accelerators: [H900]
device_names: ["H900"]
dense_peak_tflops: {bf16: 989, fp8: 1979}
link_gb_s: 200   # four of the eight pairs of links
"""


def test_a_gpu_in_a_file_of_a_user_s_own_is_swept_planned_and_recognized(run_cli: Any, tmp_path: Path) -> None:
    (tmp_path / "mine" / "hardware").mkdir(parents=True)
    (tmp_path / "mine" / "hardware" / "h900.yaml").write_text(H900)
    words = ["hardware=h900", "model=llama3_8b", "gpus=8", "tp=8"]
    for folder in (["--config-dir", "mine"], ["--config-dir=mine"], ["config_dir=mine"]):
        planned = run_cli("plan", *folder, *words)
        assert planned.code == 0 and "8 x h900" in planned.out, planned.err
    node = gpu_node("NVIDIA H900", "H900")
    found = hardware_of(node)
    assert (found.name, found.link_gb_s, found.memory_gib) == ("h900", 200, catalogue()["h100"].memory_gib)
    assert list_figures(found)[-1] == ("power", "700 W", catalogue()["h100"].sources["power"])
    assert list_figures(Hardware(name="own", power_w=5, source="measured")) == [("power", "5 W", "measured")]
    assert list_figures(Hardware(name="own", power_w=5)) == [("power", "5 W", "no source")]
    swept = run_cli("--config-dir=mine", "hardware=h900", "workload=parallel", "gpus=8", "plan=true")
    assert swept.code == 0 and "8 x h900, planned" in swept.out, swept.err
    refused = run_cli("plan", *words)  # without the folder
    assert refused.code == 2 and "hardware=h900: must be one of" in refused.err and "h900" not in catalogue()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: h900\nmemory_gb: 80\n", "hardware/h900.yaml: memory_gb: unknown key. .*Did you mean memory_gib"),
        ("", "hardware/h900.yaml: must be a mapping"),
        ("name: [", "hardware/h900.yaml: cannot be read"),
    ],
)
def test_a_wrong_file_of_a_gpu_is_named_in_a_line(run_cli: Any, tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "hardware").mkdir()
    (tmp_path / "hardware" / "h900.yaml").write_text(text)
    refused = run_cli("plan", "--config-dir=.", "hardware=h900", "model=llama3_8b", "gpus=8")
    use_config_dir(None)
    assert refused.code == 2 and re.search(message, refused.err) and len(refused.err.splitlines()) == 1, refused.err
