"""GPUs as their drivers report them. AMD SMI is a stand-in: what its documentation says is all there is to test."""

import importlib
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.support.amd import use_stand_in
from workloads.api.gpus import amd, nvidia, open_gpus
from workloads.api.host import (
    describe_gpu,
    gpu_identities,
    gpus_used_gib,
    node_activity,
    read_network_errors,
    read_networks,
)
from workloads.instruments import telemetry


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function that makes `import amdsmi` the stand-in in a scenario."""
    return partial(use_stand_in, monkeypatch)


def test_an_mi300x_is_described_in_our_units(load: Callable[[str], None]) -> None:
    load("mi300x")
    identities = gpu_identities()
    assert [gpu.number for gpu in identities] == list(range(8))
    first = identities[0]
    assert (first.vendor, first.name, first.device_id) == ("amd", "AMD Instinct MI300X", "0x74a1")
    assert first.memory_gib == pytest.approx(191.98, abs=0.01)
    assert (first.architecture, first.compute_units) == ("gfx942", 304)
    assert (first.compute_partition, first.memory_partition) == ("SPX", "NPS1")
    assert [gpu.numa_node for gpu in identities] == [0] * 4 + [1] * 4
    with open_gpus() as gpus:
        limits, reading = gpus[0].limits(), gpus[0].read()
    assert (limits.power_limit_w, limits.power_default_w) == (750, 750)
    assert (reading.power_w, reading.temperature_c) == (748, 61)
    assert reading.clock_mhz == pytest.approx(1300)  # the mean of eight dies


def test_gpus_are_numbered_as_hip_numbers_them(load: Callable[[str], None]) -> None:
    load("reordered")
    identities = gpu_identities()
    assert [gpu.number for gpu in identities] == list(range(8))
    assert [gpu.uuid for gpu in identities[:2]] == ["0x000000000000A004", "0x000000000000A005"]


def test_a_virtual_function_lacks_what_a_guest_may_not_read(load: Callable[[str], None]) -> None:
    load("mi300x_virtual")
    with open_gpus() as gpus:
        described = describe_gpu(gpus[0])
    assert described["device_id"] == "0x74b5" and described["responds"] and described["driver"] == "6.12.12"
    assert described["firmware"] == "022.040.003.043.000001"
    assert not {"power_limit_w", "compute_partition", "memory_partition", "retired_pages"} & described.keys()


def test_partitions_are_gpus_of_their_own(load: Callable[[str], None]) -> None:
    load("mi300x_cpx_nps4")
    identities = gpu_identities()
    assert len(identities) == 64 and {gpu.compute_units for gpu in identities} == {38}
    assert {(gpu.compute_partition, gpu.memory_partition) for gpu in identities} == {("CPX", "NPS4")}
    assert identities[0].memory_gib == pytest.approx(191.98 / 4, abs=0.01)


@pytest.mark.parametrize(("scenario", "name"), [("not_available", "AMD GPU"), ("raising", "")])
def test_a_gpu_that_reports_nothing_is_still_counted(load: Callable[[str], None], scenario: str, name: str) -> None:
    """One whose calls return N/A responds; one whose calls raise does not."""
    load(scenario)
    identities = gpu_identities()
    assert [(gpu.number, gpu.name) for gpu in identities] == [(number, name) for number in range(8)]
    assert gpus_used_gib() == (0.0,) * 8
    with open_gpus() as gpus:
        assert gpus[0].read().slowdowns is None and gpus[0].limits().power_limit_w is None


@pytest.mark.parametrize("scenario", ["no_gpus", "no_driver", "no_library"])
def test_without_gpus_a_driver_or_its_library_there_are_none(load: Callable[[str], None], scenario: str) -> None:
    load(scenario)
    assert [gpu for gpu in gpu_identities() if gpu.vendor == "amd"] == []


def test_another_users_process_and_its_memory_are_reported(load: Callable[[str], None]) -> None:
    load("in_use")
    assert node_activity()["other_gpu_processes"] == 1
    assert gpus_used_gib()[3] == 20 and max(gpus_used_gib()[:3]) < 1


def test_ray_shutting_amd_smi_down_does_not_stop_readings(load: Callable[[str], None]) -> None:
    load("mi300x")
    gpu_identities()
    importlib.import_module("amdsmi").amdsmi_shut_down()
    assert gpu_identities()[0].name == "AMD Instinct MI300X"


@pytest.mark.parametrize(("scenario", "slowed_by"), [("mi300x", "power_cap"), ("hot", "power_cap socket_thermal")])
def test_slowdowns_are_those_of_the_measurement(
    load: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, scenario: str, slowed_by: str
) -> None:
    """Counters that were above zero before and do not rise are no slowdown. Only heat taints."""
    load(scenario)
    monkeypatch.setattr(telemetry, "find_gpu", lambda device: amd.open_gpus()[0])
    monkeypatch.setattr(telemetry, "POWER_WINDOW_S", 0.0)
    with telemetry.monitor_gpu(torch.device("cuda", 0)) as readings:
        pass
    assert readings.machine_info() == {"slowed_by": slowed_by, "tainted": scenario == "hot"}
    assert readings.metrics() == {"sm_clock_mhz": 1300, "power_w": 748, "temperature_c": 61}


@pytest.mark.parametrize(
    ("scenario", "has_counter"),
    [("mi300x", True), ("mi300x_virtual", False), ("mi300x_cpx_nps4", False), ("mi250x", False), ("raising", False)],
)
def test_an_energy_counter_counts_if_it_is_the_devices_own(
    load: Callable[[str], None], scenario: str, has_counter: bool
) -> None:
    load(scenario)
    with open_gpus() as gpus:
        before, after = gpus[0].read().energy_j, gpus[0].read().energy_j
    assert (before is not None and after is not None and after > before) == has_counter


def test_the_energy_of_steps_leaves_out_what_came_before(
    load: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    load("mi300x")
    monkeypatch.setattr(telemetry, "find_gpu", lambda device: amd.open_gpus()[0])
    monkeypatch.setattr(amd.AmdGpu, "interval_s", 0.02)
    with telemetry.monitor_gpu(torch.device("cuda", 0)) as readings:
        time.sleep(0.3)
        readings.begin_steps()
        time.sleep(1.1)
    energy = readings.energy(4)
    assert energy is not None and energy.source == "counter" and energy.steps == 4
    assert energy.joules == pytest.approx(748 * energy.seconds, rel=0.05)


@pytest.mark.parametrize(
    ("environment", "serial"),
    [
        ({}, 0xA000),
        ({"HIP_VISIBLE_DEVICES": "5"}, 0xA005),
        ({"CUDA_VISIBLE_DEVICES": "6,1"}, 0xA006),
        ({"HIP_VISIBLE_DEVICES": "5", "CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}, 0xA005),
        ({"ROCR_VISIBLE_DEVICES": "4,5,6,7", "HIP_VISIBLE_DEVICES": "2"}, 0xA006),
    ],
)
def test_the_first_visible_gpu_is_read(
    load: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], serial: int
) -> None:
    load("mi300x")
    for name in ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    gpu = telemetry._find_amd_gpu(amd.open_gpus(), 0)
    assert gpu is not None and gpu.identity.uuid == f"0x{serial:016X}"


def test_a_power_cap_in_watts_or_microwatts_is_the_same(
    load: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    load("mi300x")
    gpu = amd.open_gpus()[0]
    assert gpu.limits().power_limit_w == 750
    watts = {"power_cap": 750, "default_power_cap": 750}
    monkeypatch.setattr("amdsmi.amdsmi_get_power_cap_info", lambda handle: watts)
    assert gpu.limits().power_limit_w == 750


def test_a_virtual_network_card_has_no_rate(tmp_path: Path) -> None:
    for name, speed in (("eth0", "-1\n"), ("eth1", "100000\n"), ("lo", "")):
        card = tmp_path / "class" / "net" / name
        (card / "device" if speed else card).mkdir(parents=True)
        (card / "speed").write_text(speed)
        (card / "mtu").write_text("1400\n")
    assert read_networks(tmp_path) == {"eth0": "MTU 1400", "eth1": "100000 Mb/s, MTU 1400"}


def test_the_counters_of_errors_and_retries_of_networks_are_read_and_others_are_not(tmp_path: Path) -> None:
    port, card = tmp_path / "class/infiniband/mlx5_0/ports/1", tmp_path / "class/net/eth0"
    files = {port / "counters": ["symbol_error", "port_rcv_data"], card / "statistics": ["rx_errors", "rx_bytes"]}
    files |= {port / "hw_counters": ["packet_seq_err", "req_cqe_flush_error"], card / "device": []}
    for folder, names in files.items():
        folder.mkdir(parents=True)
        for name in names:
            (folder / name).write_text("3\n")
    names = ["eth0 rx_errors", "mlx5_0 port 1 symbol_error", "mlx5_0 port 1 packet_seq_err"]
    assert read_network_errors(tmp_path) == dict.fromkeys(names, 3)


def test_errors_of_an_nvidia_gpu_are_read_and_those_of_programs_are_not_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """NVML names the GPU of each XID error until none is left."""
    import pynvml

    def wait(events: str, timeout_ms: int) -> SimpleNamespace:
        if not xids:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT)
        return SimpleNamespace(device=1, eventData=xids.pop())

    xids, registered = [79, 43, 63], list[int]()
    functions: dict[str, object] = dict.fromkeys(("Init", "Shutdown", "EventSetCreate"), lambda: "events")
    functions |= {"DeviceGetCount": lambda: 2, "DeviceGetHandleByIndex": lambda number: number}
    functions |= {"DeviceRegisterEvents": lambda handle, *_: registered.append(handle), "EventSetWait_v2": wait}
    functions |= {"DeviceGetIndex": lambda handle: handle}
    functions |= {"DeviceGetName": lambda _: "H100", "DeviceGetPcieReplayCounter": lambda _: 4}
    for name, function in functions.items():
        monkeypatch.setattr(pynvml, f"nvml{name}", function)
    watch = nvidia.XidWatch()
    assert registered == [0, 1] and watch.read() == {1: [63, 79]} == watch.read()  # a reading may be repeated
    errors = nvidia.NvidiaGpu(pynvml, 0).errors()
    assert (errors.pcie_replays, errors.corrected_errors) == (4, None)
