"""The doctor on nodes with AMD GPUs, of which AMD SMI's stand-in reports what its documentation says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from sweeper.commands.doctor.checks import REMEDIES, Finding, check_nodes
from tests.support.amd import use_stand_in
from workloads.api.host import read_kernel, read_node_state

TUNED = {"release": "6.8", "numa_balancing": "0", "command_line": ["iommu=pt"], "is_guest": False}
Diagnose = Callable[..., list[Finding]]


@pytest.fixture
def diagnose(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Diagnose:
    """Return a function that returns the findings of a node of the stand-in, in a scenario and with kernel settings."""

    def diagnose(scenario: str, **kernel: Any) -> list[Finding]:
        use_stand_in(monkeypatch, scenario)
        roomy = {"shared_gib": 64.0, "free_gib": 512.0, "disk_gib": 512.0}
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
