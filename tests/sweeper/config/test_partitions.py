"""Instinct GPUs divided into several devices: what one of them has, and that unlike ones do not meet.

Their driver is a stand-in for AMD SMI, made from its documentation.
"""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sweeper.config.catalogue import catalogue, devices_per_gpu, divide, find_hardware
from sweeper.config.hardware import Node, Target, hardware_of
from sweeper.config.schema import Hardware
from sweeper.preflight.devices import describe_inventory, planned_target, select_target
from sweeper.tracking.provenance import gather
from tests.support.amd import use_stand_in
from tests.support.planner import machine_of
from workloads.api import host
from workloads.api.errors import UserInputError

MI300X = catalogue()["mi300x"]
INSTINCTS = sorted(name for name, hardware in catalogue().items() if hardware.dies)


@pytest.fixture
def read_node(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Node]:
    """Return a function that describes a node whose driver is the stand-in in a scenario."""

    def read(scenario: str) -> Node:
        use_stand_in(monkeypatch, scenario)
        gpus = tuple(gpu for gpu in host.gpu_identities() if gpu.vendor == "amd")
        return Node(scenario, cpus=192, cpu_name="EPYC", gpus=len(gpus), gpu_identities=gpus)

    return read


@given(st.sampled_from(INSTINCTS), st.sampled_from(["DPX", "QPX", "CPX"]), st.sampled_from(["NPS1", "NPS2", "NPS4"]))
def test_the_devices_of_a_gpu_have_together_what_it_has(name: str, compute: str, memory: str) -> None:
    hardware = replace(catalogue()[name], partition=f"{compute}/{memory}")
    count, device = devices_per_gpu(hardware), divide(hardware)
    assert count > 1 and device.memory_gib and device.bandwidth_tb_s and device.link_gb_s
    for dtype, peak in hardware.dense_peak_tflops.items():
        assert count * device.dense_peak_tflops[dtype] == pytest.approx(peak)
    assert count * device.memory_gib == pytest.approx(hardware.memory_gib)
    assert count * device.bandwidth_tb_s == pytest.approx(hardware.bandwidth_tb_s)
    assert count * device.link_gb_s == pytest.approx(hardware.link_gb_s)


@pytest.mark.parametrize("name", sorted(catalogue()))
def test_an_undivided_gpu_keeps_all_that_the_catalogue_says(name: str) -> None:
    hardware = catalogue()[name]
    assert divide(hardware) == hardware
    assert divide(hardware, hardware.compute_units, hardware.memory_gib) == hardware


def test_a_partition_in_cpx_has_an_eighth_of_an_mi300x(read_node: Callable[[str], Node]) -> None:
    node = read_node("mi300x_cpx_nps4")
    target = select_target(Hardware(name="auto"), [node], 64)
    device = target.hardware
    assert (target.model, target.devices, device.name) == ("AMD Instinct MI300X CPX/NPS4", 64, "mi300x")
    assert device.dense_peak_tflops["bf16"] == pytest.approx(1307.4 / 8)
    # The driver reports a quarter of the GPU, which two devices share.
    assert node.gpu_identities[0].memory_gib == pytest.approx(191.98 / 4, abs=0.01)
    assert device.memory_gib == pytest.approx(191.98 / 8) and device.bandwidth_tb_s == pytest.approx(5.3 / 8)
    machine = machine_of(target, 64)
    assert machine.ranks_per_node == 64 and machine.cluster.device.sustained_tflops["bf16"] == pytest.approx(
        0.51 * 1307.4 / 8
    )
    topology = machine.cluster.topology
    assert (topology.wiring, topology.link_gb_s) == ("host", pytest.approx(448 / 8))


def test_compute_units_tell_a_partition_whose_mode_the_driver_does_not_report() -> None:
    """A guest may not read the modes."""
    eighth = divide(MI300X, units=38, memory_gib=23.99)
    assert eighth.dense_peak_tflops["bf16"] == pytest.approx(1307.4 / 8) and eighth.memory_gib == 23.99
    whole = divide(MI300X, units=304, memory_gib=191.9)
    assert whole == MI300X
    # The device id of an MI250X is also the MI250's, whose data sheet has 181 TFLOP/s for a die.
    mi250 = divide(catalogue()["mi250x"], units=104)
    assert mi250.dense_peak_tflops["bf16"] == pytest.approx(181, abs=0.1) and mi250.memory_gib == 63.98


def test_the_memory_of_a_device_without_a_data_sheet_is_what_its_driver_reports(
    read_node: Callable[[str], Node],
) -> None:
    node = read_node("unknown_model")
    target = select_target(hardware_of(node), [node], 8)
    assert target.hardware.memory_gib == pytest.approx(191.98, abs=0.01)
    assert target.with_nodes([replace(node, id="joined")]).devices == 16


def test_gpus_in_different_partition_modes_are_not_mixed(read_node: Callable[[str], Node]) -> None:
    whole, divided = read_node("mi300x"), read_node("mi300x_cpx_nps4")
    assert describe_inventory([whole, divided]).startswith(
        "8 x AMD Instinct MI300X (hardware=mi300x), 64 x AMD Instinct MI300X CPX/NPS4 (hardware=mi300x)"
    )
    for hardware in (MI300X, Hardware(name="auto")):
        with pytest.raises(UserInputError, match=r"CPX/NPS4 and SPX/NPS1.*set hardware.partition=CPX/NPS4\|SPX/NPS1"):
            select_target(hardware, [whole, divided], 8)
    targets = [
        select_target(replace(kind, partition=modes), [whole, divided], 8)
        for kind, modes in ((MI300X, "SPX/NPS1"), (Hardware(name="auto"), "CPX/NPS4"))
    ]
    assert [(target.devices, target.hardware.partition) for target in targets] == [(8, None), (64, "CPX/NPS4")]
    assert targets[0].hardware == MI300X and targets[0].model != targets[1].model
    for target, joining in ((targets[0], divided), (targets[1], whole)):
        assert target.with_nodes([joining]).nodes == target.nodes  # a node that joins later
    half = whole.gpu_identities[:4] + divided.gpu_identities[:4]
    with pytest.raises(UserInputError, match=r"hardware.partition=SPX/NPS1: no node has all of its GPUs in it"):
        select_target(replace(MI300X, partition="SPX/NPS1"), [replace(whole, gpu_identities=half)], 1)


def test_a_partition_can_be_planned_without_having_it() -> None:
    target = planned_target(replace(MI300X, partition="CPX/NPS4"), 128)
    assert (target.model, target.devices, len(target.nodes)) == ("mi300x CPX/NPS4", 128, 2)
    assert target.hardware.memory_gib == pytest.approx(191.98 / 8)
    assert planned_target(replace(MI300X, partition="SPX/NPS1"), 8).hardware == MI300X
    for name, modes, message in (("mi300x", "CPX", "must be such as"), ("h200", "CPX/NPS4", "no known partitions")):
        with pytest.raises(UserInputError, match=f"hardware.partition={modes}: .*{message}"):
            planned_target(replace(catalogue()[name], partition=modes), 8)


def test_a_rate_of_a_partition_has_the_peak_of_a_partition() -> None:
    found = find_hardware("AMD Instinct MI300X CPX/NPS4")
    assert found is not None and found.dense_peak_tflops["bf16"] == pytest.approx(1307.4 / 8)
    assert find_hardware("AMD Instinct MI300X") == MI300X


def test_both_partition_modes_are_in_the_provenance(read_node: Callable[[str], Node]) -> None:
    node = replace(read_node("mi300x_cpx_nps4"), gpus=1)
    target: Target = select_target(MI300X, [node], 1)
    recorded = SimpleNamespace(**gather(target, ["sweeper"]))
    assert recorded.machine["model"] == "AMD Instinct MI300X CPX/NPS4" and recorded.hardware["partition"] == "CPX/NPS4"
    for gpu in (recorded.gpus[-1], recorded.machine["nodes"][0]["gpu_identities"][0]):
        assert (gpu["compute_partition"], gpu["memory_partition"]) == ("CPX", "NPS4")
