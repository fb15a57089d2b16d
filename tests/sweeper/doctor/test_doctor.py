"""What is wrong with a node is found, and said with what to do."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from sweeper.doctor.__main__ import Finding, of_gpu, of_nodes, of_stores
from tests.conftest import REPOSITORY, Place
from workloads.api import host
from workloads.api.contract import Infeasible, Rank
from workloads.api.node_state import read_node_state
from workloads.api.trial import run_trial

GPU = {"number": 0, "answers": True, "name": "NVIDIA H200", "driver": "580.1", "used_gib": 0.5, "power_limit_w": 700.0}
GPU |= {"power_default_w": 700.0, "clock_limit_mhz": 1980, "clock_default_mhz": 1980, "uncorrected_errors": 0}


def node(name: str = "n0", **changes: Any) -> dict[str, Any]:
    plain = {
        "node": name,
        "versions": {"torch": "2.13", "ray": "2.60"},
        "cpus": 8,
        "shared_gib": 16.0,
        "free_gib": 64.0,
    }
    return plain | {"disk_gib": 100.0, "gpus": [GPU]} | changes


def test_nothing_is_found_where_all_is_well() -> None:
    assert list(of_nodes([node("n0"), node("n1")])) == []


@pytest.mark.parametrize(
    ("healths", "where", "what"),
    [
        ([node(shared_gib=0.06)], "n0", "/dev/shm has 0.1 GiB"),
        ([node(free_gib=1.0)], "n0", "1.0 GiB of memory"),
        ([node(disk_gib=1.0)], "n0", "1.0 GiB of disk"),
        ([node("a"), node("b"), node("c", versions={"torch": "2.11", "ray": "2.60"})], "nodes", "but c 2.11"),
        (
            [node("a"), node("b"), node("c", gpus=[GPU | {"driver": "570.2"}])],
            "nodes",
            "driver is 580.1 on most, but c 570.2",
        ),
        ([node("a"), node("b"), node("c", gpus=[GPU, GPU])], "nodes", "c 2 x NVIDIA H200"),
    ],
    ids=["shared", "memory", "disk", "version", "driver", "gpus"],
)
def test_what_a_node_lacks_and_where_nodes_differ(healths: list[dict[str, Any]], where: str, what: str) -> None:
    (found,) = of_nodes(healths)
    assert found.where == where and what in found.what and found.do


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"used_gib": 40.0}, "40.0 GiB of it are in use"),
        ({"power_limit_w": 450.0}, "450 W of 700 W"),
        ({"clock_limit_mhz": 1200}, "1200 MHz of 1980 MHz"),
        ({"uncorrected_errors": 3}, "3 memory errors"),
    ],
)
def test_what_is_wrong_with_a_gpu(changes: dict[str, Any], what: str) -> None:
    (found,) = of_gpu("n0 GPU 0", GPU | changes)
    assert what in found.what and found.spoils


def test_a_store_that_does_not_answer_is_found() -> None:
    (found,) = of_stores("http://127.0.0.1:9")
    assert isinstance(found, Finding) and "nothing answers there" in found.what


def test_the_health_of_this_machine_is_plain() -> None:
    found = read_node_state(".")
    assert found["free_gib"] > 0 and found["versions"]["ray"] and found["gpus"] == []
    assert "nodes" not in {finding.where for finding in of_nodes([found, found])}


def test_a_sum_needs_somebody_to_sum_with() -> None:
    with pytest.raises(Infeasible, match="gpus=2 or more"):
        run_trial("allreduce", {}, Rank())


def test_the_doctor_tries_what_is_here(place: Place) -> None:
    command = [sys.executable, "-m", "sweeper.doctor", "--dir", str(place.path)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
    assert "TFLOP/s in the mean" in done.stdout and "GB/s each way" in done.stdout, done.stdout + done.stderr
    assert done.returncode == int("\n! " in done.stdout) and "Traceback" not in done.stderr


def test_a_gpu_that_has_fallen_off_the_bus_is_named_and_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the driver answers for the second of three: its handle cannot be had."""
    import pynvml

    def handle(number: int) -> object:
        if number == 1:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return number + 1

    def refused(*_: object) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    for name in ("DeviceGetMemoryInfo", "DeviceGetPowerManagementLimit", "DeviceGetApplicationsClock"):
        monkeypatch.setattr(pynvml, f"nvml{name}", refused)
    for name in ("DeviceGetTotalEccErrors", "SystemGetDriverVersion", "DeviceGetComputeRunningProcesses"):
        monkeypatch.setattr(pynvml, f"nvml{name}", refused)
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 3)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", handle)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetName", lambda _: "NVIDIA H200")
    assert host.gpu_names() == ("NVIDIA H200", "", "NVIDIA H200")
    assert host.node_activity().keys() == {"node_load"}
    findings = list(of_nodes([read_node_state(".")]))
    (lost,) = [finding for finding in findings if "GPU 1" in finding.where]
    assert lost.spoils and "does not answer" in lost.what
