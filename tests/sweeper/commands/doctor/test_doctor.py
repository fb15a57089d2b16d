"""The doctor: problems of nodes, GPUs and stores are reported with a remedy, of AMD GPUs by AMD SMI's stand-in."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from sweeper.commands.doctor import exercise
from sweeper.commands.doctor.checks import (
    REMEDIES,
    Finding,
    add_changes,
    check_gpu,
    check_load,
    check_nodes,
    check_store,
    has_new_use,
)
from sweeper.commands.doctor.main import DoctorRequest, examine
from sweeper.config.catalogue import catalogue
from sweeper.config.hardware import Node
from sweeper.execution import cluster, ray_environment
from tests.conftest import REPOSITORY, Workspace, environment
from tests.support.amd import use_stand_in
from workloads.api import host
from workloads.api.contract import Infeasible, Rank
from workloads.api.gpus import GpuIdentity
from workloads.api.host import count_local_cores, read_kernel, read_node_state
from workloads.api.trial import run_trial

GPU = {"number": 0, "vendor": "nvidia", "responds": True, "name": "NVIDIA H200", "driver": "580.1", "used_gib": 0.5}
GPU |= {"power_limit_w": 700.0, "power_default_w": 700.0, "clock_limit_mhz": 1980, "clock_default_mhz": 1980}
GPU |= {"uncorrected_errors": 0}


def node_state(node: str = "n0", **changes: Any) -> dict[str, Any]:
    """Return the state of a healthy node, with `changes`."""
    healthy = {
        "node": node,
        "versions": {"torch": "2.13", "ray": "2.60"},
        "kernel": {"release": "6.8", "numa_balancing": "1", "command_line": [], "is_guest": False},
        "cpus": 8,
        "shared_gib": 16.0,
        "free_gib": 64.0,
        "disk_gib": 100.0,
        "gpus": [GPU],
    }
    return healthy | changes


def test_healthy_equal_nodes_have_no_findings() -> None:
    assert list(check_nodes([node_state("n0"), node_state("n1")])) == []


@pytest.mark.parametrize(
    ("node_states", "location", "problem"),
    [
        ([node_state(shared_gib=0.06)], "n0", "/dev/shm has 0.1 GiB"),
        ([node_state(free_gib=1.0)], "n0", "1.0 GiB of memory"),
        ([node_state(disk_gib=1.0)], "n0", "1.0 GiB of disk"),
        (
            [node_state("a"), node_state("b"), node_state("c", versions={"torch": "2.11", "ray": "2.60"})],
            "nodes",
            "torch is 2.13 on most nodes, but c 2.11",
        ),
        (
            [node_state("a"), node_state("b"), node_state("c", gpus=[GPU | {"driver": "570.2"}])],
            "nodes",
            "driver is 580.1 on most nodes, but c 570.2",
        ),
        ([node_state("a"), node_state("b"), node_state("c", gpus=[GPU, GPU])], "nodes", "c 2 x NVIDIA H200"),
    ],
    ids=["shared", "memory", "disk", "version", "driver", "gpus"],
)
def test_a_problem_of_a_node_and_a_difference_between_nodes_are_reported(
    node_states: list[dict[str, Any]], location: str, problem: str
) -> None:
    (finding,) = check_nodes(node_states)
    assert finding.location == location and problem in finding.problem and finding.remedy


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"used_gib": 40.0}, "40.0 GiB of its memory are in use"),
        ({"power_limit_w": 450.0}, "450 W of 700 W"),
        ({"clock_limit_mhz": 1200}, "1200 MHz of 1980 MHz"),
        ({"uncorrected_errors": 3}, "3 uncorrected memory errors"),
        ({"processes": 2}, "2 other processes use it"),
        ({"pcie_width": 8, "pcie_width_max": 16}, "8 of 16 lanes"),
        ({"links_down": 1}, "1 of its links to other GPUs are down"),
    ],
)
def test_a_problem_of_a_gpu_is_reported_and_affects_results(changes: dict[str, Any], problem: str) -> None:
    (finding,) = check_gpu("n0 GPU 0", GPU | changes)
    assert problem in finding.problem and finding.affects_results


def test_a_value_that_the_driver_does_not_report_is_not_a_problem() -> None:
    partial = {name: value for name, value in GPU.items() if name not in ("power_limit_w", "clock_limit_mhz")}
    assert partial["power_default_w"] and not list(check_gpu("n0 GPU 0", partial | {"pcie_width_max": 16}))


def test_a_store_that_does_not_respond_is_reported() -> None:
    (finding,) = check_store("http://127.0.0.1:9")
    assert finding.location == "store" and "nothing responds there" in finding.problem


def test_the_state_of_this_machine_is_read() -> None:
    state = read_node_state(".")
    assert state["free_gib"] > 0 and state["versions"]["ray"] and state["gpus"] == []
    assert "nodes" not in {finding.location for finding in check_nodes([state, state])}


def test_workers_that_other_processes_come_before_are_reported() -> None:
    state = {"gpus": [], "cpus": 8, "use": 0.5}
    (finding,) = check_load("n0", state | {"niceness": 15})
    assert "niceness 15" in finding.problem and "RAY_worker_niceness=0" in finding.remedy
    assert list(check_nodes([node_state("n0") | {"niceness": 15}])) == [finding]  # doctor and the record of accept
    assert not list(check_load("n0", state | {"niceness": 0}))


def test_a_process_that_runs_is_named_and_one_that_has_ended_is_not() -> None:
    cores = sorted(os.sched_getaffinity(0))
    burners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * len(cores))]
    try:
        started_s = time.monotonic()
        while time.monotonic() < started_s + 3:  # long enough for a load average
            time.sleep(0.1)
        running = host.NodeWatch().read_state(".")
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()
    after = host.NodeWatch().read_state(".")
    pids = {f"(pid {burner.pid})" for burner in burners}
    (finding,) = check_load("n0", running | {"gpus": [], "niceness": 0})
    assert f" of {len(cores)} core" in finding.problem and finding.by_others and not finding.affects_results
    named = finding.problem.partition("most of it ")[2]
    # On a busy machine, a process of somebody else may use even more.
    assert any(pid in named for pid in pids) or Path("/proc", named.partition("pid ")[2].rstrip(")")).exists()
    assert not any(pid in after["busiest"] for pid in pids)


def test_the_cores_of_a_numa_node_that_may_be_used_are_counted(tmp_path: Path) -> None:
    (file := tmp_path / "devices/system/node/node1/cpulist").parent.mkdir(parents=True)
    own = min(os.sched_getaffinity(0))
    for cores, usable in ((f"{own},70000-70003", 1), ("70000-70003", 0), ("", None)):
        file.write_text(f"{cores}\n")
        assert count_local_cores(1, tmp_path) == usable
    assert count_local_cores(None, tmp_path) is None


@pytest.mark.long(8)
def test_the_state_of_a_node_of_a_cluster_is_read_on_it() -> None:
    program = (
        "import ray; from sweeper.commands.doctor.exercise import cluster, NodeWatches, Node;"
        "cluster.init_ray(address='local', num_cpus=1); node = ray.get_runtime_context().get_node_id();"
        "watches = NodeWatches([Node('', 1, '', id=node)], '.'); watches.update(); print(watches.states)"
    )
    result = subprocess.run([sys.executable, "-c", program], env=environment(), capture_output=True, text=True)
    assert "free_gib" in result.stdout and "risen" in result.stdout, result.stderr
    assert f"'niceness': {os.nice(0)}," in result.stdout  # Ray's default is 15


def test_an_all_reduce_of_one_rank_is_infeasible() -> None:
    with pytest.raises(Infeasible, match="gpus=2 or more"):
        run_trial("collectives", {}, Rank())


@pytest.mark.long(27)
def test_the_command_exercises_this_machine(workspace: Workspace) -> None:
    command = [sys.executable, "-m", "sweeper", "doctor", f"dir={workspace.path}"]
    result = subprocess.run(command, cwd=REPOSITORY, env=environment(), capture_output=True, text=True, timeout=120)
    assert "node all-reduce 4 MiB" in result.stdout and "nvidia-smi" not in result.stdout, result.stdout + result.stderr
    assert result.returncode == int("\n! " in result.stdout) and "Traceback" not in result.stderr


def test_the_figures_of_the_clusters_gpus_are_printed_with_their_sources(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    identities = tuple(GpuIdentity(number, "nvidia", "NVIDIA H200") for number in range(8))
    nodes = [Node(name, 64, "Xeon", gpus=8, accelerator="H200", gpu_identities=identities) for name in "ab"]
    monkeypatch.setattr(cluster, "discover_nodes", lambda *_: nodes)
    monkeypatch.setattr(ray_environment, "prepare", lambda *_: None)
    examine(DoctorRequest(dir=str(tmp_path), quick=True))
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("h200 ")]
    assert [line.split()[1] for line in lines] == ["peaks:", "memory:", "bandwidth:", "power:", "price:"]
    assert lines[3] == f"h200       power: 700 W; {catalogue()['h200'].sources['power']}"


def test_a_gpu_that_fell_off_the_bus_is_reported_and_the_others_are_still_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver has no handle for the second of three GPUs."""
    import pynvml

    def get_handle(number: int) -> object:
        if number == 1:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return number + 1

    def not_supported(*_: object) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    missing = ["MemoryInfo", "EnforcedPowerLimit", "ApplicationsClock", "TotalEccErrors", "ComputeRunningProcesses"]
    functions: dict[str, object] = {f"DeviceGet{name}": not_supported for name in missing}
    functions |= {"SystemGetDriverVersion": not_supported, "Init": lambda: None, "Shutdown": lambda: None}
    functions |= {"DeviceGetCount": lambda: 3, "DeviceGetHandleByIndex": get_handle}
    functions |= {"DeviceGetName": lambda _: "NVIDIA H200"}
    for name, function in functions.items():
        monkeypatch.setattr(pynvml, f"nvml{name}", function)
    assert [gpu.name for gpu in host.gpu_identities()] == ["NVIDIA H200", "", "NVIDIA H200"]
    assert host.node_activity().keys() == {"node_load"}
    findings = list(check_nodes([read_node_state(".")]))
    (lost,) = [finding for finding in findings if "GPU 1" in finding.location]
    assert lost.affects_results and "does not respond" in lost.problem


@pytest.mark.parametrize(
    ("later", "problem", "affects_results"),
    [
        ({"used_gib": 9.0}, "another process uses it: 9.0 GiB", True),
        ({"processes": 1}, "1 other processes use it", True),
        ({"uncorrected_errors": 2}, "2 uncorrected memory errors", True),
        ({"xids": [79]}, "XID 79 during the test", True),
        ({"responds": False}, "does not respond", True),
        ({"corrected_errors": 12}, "had 2 corrected memory errors during the test", False),
        ({"pcie_replays": 5}, "had 5 packets that were sent again on its PCIe link during the test", False),
        ({"used_gib": 0.1, "corrected_errors": 4, "processes": 0}, "", False),
    ],
)
def test_what_happens_to_a_gpu_during_a_test_is_a_problem(
    later: dict[str, Any], problem: str, affects_results: bool
) -> None:
    gpu = GPU | {"corrected_errors": 10, "pcie_replays": 0}
    before, after = ({**node_state(), "network_errors": {}, "gpus": [one]} for one in (gpu, gpu | later))
    found = [(f.problem, f.affects_results) for f in check_nodes([add_changes(before, after)]) if "GPU 0" in f.location]
    assert [(problem in text, affects) for text, affects in found] == [(True, affects_results)] * bool(problem), found
    assert has_new_use(before, after) == ("of its memory" in problem or "processes" in problem or "another" in problem)


def test_retries_of_a_network_port_during_a_test_are_reported_and_those_of_before_are_not() -> None:
    counts = ({"mlx5_0 port 1 packet_seq_err": 7, "eth0 rx_errors": 3}, {"mlx5_0 port 1 packet_seq_err": 9})
    before, after = ({**node_state(), "network_errors": errors} for errors in counts)
    (found,) = [f for f in check_nodes([add_changes(before, after)]) if "seq" in f.problem or "eth" in f.problem]
    assert "packet_seq_err rose by 2" in found.problem and not found.affects_results


def test_counters_of_an_amd_gpu_that_grow_are_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use_stand_in(monkeypatch, "wearing")
    before, after = read_node_state(str(tmp_path)), read_node_state(str(tmp_path))
    found = {f.problem: f.location[-5:] for f in check_nodes([add_changes(before, after)]) if "had" in f.problem}
    assert found == {
        "had 1 corrected memory errors during the test": "GPU 6",
        "had 2 packets that were sent again on its PCIe link during the test": "GPU 6",
    }


@pytest.mark.parametrize(
    ("changes", "code", "last"),
    [
        ({}, 0, "0 problems found"),
        ({"use": 1e6, "busiest": "python3 (pid 41)"}, 0, "0 problems found, 1 note"),  # not a problem of the device
        ({"shared_gib": 0.1}, 1, "1 problem found"),
        ({"shared_gib": 0.1, "free_gib": 1.0, "disk_gib": 1.0}, 1, "1 problem found, 2 notes"),
        ({"open_files": 256}, 0, "0 problems found, 1 note"),
    ],
)
def test_the_exit_code_of_the_doctor_is_that_of_what_it_prints(
    changes: dict[str, Any], code: int, last: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes = [Node("this machine", cpus=2, cpu_name="Laptop")]
    healthy = node_state(gpus=[], use=0.0, niceness=0, open_files=65536, network_errors={})
    monkeypatch.setattr(ray_environment, "prepare", lambda *_: None)
    monkeypatch.setattr(cluster, "discover_nodes", lambda *_: nodes)
    monkeypatch.setattr(exercise.NodeWatches, "_read", lambda *_: [healthy | changes])
    assert examine(DoctorRequest(quick=True)) == code
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == last and sum(line.startswith("! ") for line in lines) == code


TUNED = {"release": "6.8", "numa_balancing": "0", "command_line": ["iommu=pt"], "is_guest": False}
Diagnose = Callable[..., list[Finding]]


@pytest.fixture
def diagnose(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Diagnose:
    """Return a function that returns the findings of a node of the stand-in, in a scenario and with kernel settings."""

    def diagnose(scenario: str, **kernel: Any) -> list[Finding]:
        use_stand_in(monkeypatch, scenario)
        roomy = {"shared_gib": 64.0, "free_gib": 512.0, "disk_gib": 512.0, "niceness": 0}
        return list(check_nodes([read_node_state(str(tmp_path)) | roomy | {"kernel": TUNED | kernel}]))

    return diagnose


def problems(findings: Sequence[Finding]) -> list[str]:
    return [finding.problem for finding in findings]


@pytest.mark.parametrize("scenario", ["mi300x", "mi300x_virtual", "mi355x", "not_available", "raising", "hot"])
def test_a_healthy_node_has_no_findings_whatever_its_driver_leaves_out(scenario: str, diagnose: Diagnose) -> None:
    findings = diagnose(scenario)
    # A driver whose every call raises does not read its GPUs: each is reported as one that does not respond.
    assert not findings or (scenario == "raising" and all("respond" in problem for problem in problems(findings)))


@pytest.mark.parametrize(
    ("scenario", "location", "problem", "remedy"),
    [
        ("in_use", "GPU 3", "20.0 GiB of its memory are in use", "amd-smi process --gpu 3"),
        ("one_capped", "GPU 5", "limited to 600 W of 750 W", "amd-smi set --gpu 5 --power-cap 750"),
        ("mi300x_cpx_nps4", "", "64 of its GPUs are divided (CPX, NPS4)", "--compute-partition SPX"),
    ],
)
def test_a_problem_is_reported_with_the_tool_of_the_vendor(
    scenario: str, location: str, problem: str, remedy: str, diagnose: Diagnose
) -> None:
    (finding,) = diagnose(scenario)
    assert finding.location.endswith(location) and problem in finding.problem and remedy in finding.remedy
    assert finding.affects_results


def test_uncorrected_errors_take_a_gpu_out_of_service_and_retired_pages_do_not(diagnose: Diagnose) -> None:
    errors, pages = diagnose("errors")
    assert "3 uncorrected memory errors" in errors.problem and errors.affects_results
    assert "7 pages" in pages.problem and "amd-smi bad-pages --gpu 2" in pages.remedy and not pages.affects_results


@pytest.mark.parametrize(
    ("kernel", "problem"),
    [
        ({"numa_balancing": "1"}, "kernel.numa_balancing"),
        ({"command_line": ["amdgpu.gpu_recovery=1"]}, "iommu=pt"),
        ({"command_line": ["amd_iommu=off"]}, ""),
        ({"command_line": [], "is_guest": True}, ""),  # the host's command line counts
    ],
)
def test_settings_of_the_kernel_are_checked(kernel: dict[str, Any], problem: str, diagnose: Diagnose) -> None:
    found = problems(diagnose("mi300x", **kernel))
    assert len(found) == bool(problem) and (not problem or problem in found[0])


def test_the_kernels_settings_are_read_without_what_else_its_command_line_has(tmp_path: Path) -> None:
    (tmp_path / "sys" / "kernel").mkdir(parents=True)
    (tmp_path / "sys" / "kernel" / "numa_balancing").write_text("1\n")
    words = "BOOT_IMAGE=/vmlinuz root=UUID=6f1c iommu=pt amdgpu.gpu_recovery=1 rd.iscsi.password=hunter22 quiet"
    (tmp_path / "cmdline").write_text(f"{words}\n")
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nflags\t\t: fpu vme hypervisor avx2\nbugs\t\t: none\n")
    settings = read_kernel(tmp_path)
    assert settings["command_line"] == ["iommu=pt", "amdgpu.gpu_recovery=1"]
    assert settings["numa_balancing"] == "1" and settings["is_guest"]
    assert read_kernel(tmp_path / "absent")["command_line"] == []


def test_no_remedy_names_the_other_vendors_tools() -> None:
    assert REMEDIES["amd"].keys() == REMEDIES["nvidia"].keys()
    assert not [text for text in REMEDIES["amd"].values() if "nvidia" in text or "Xid" in text]
    assert not [text for text in REMEDIES["nvidia"].values() if "amd-smi" in text or "rocm-smi" in text]
