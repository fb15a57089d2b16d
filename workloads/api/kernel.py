"""Read the settings of the Linux kernel that GPUs depend on."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

# Parameters of the kernel's command line that concern memory, PCI, GPUs and clocks. Others are left out: some hold
# passwords, addresses or serial numbers.
PARAMETERS = frozenset(
    [
        "iommu",
        "amd_iommu",
        "intel_iommu",
        "numa_balancing",
        "pci",
        "hugepages",
        "transparent_hugepage",
        "amdgpu",
        "nvidia",
        "mitigations",
        "isolcpus",
        "nohz_full",
        "processor",
        "intel_idle",
        "amd_pstate",
        "cpuidle",
    ]
)


def read_kernel(proc: Path = Path("/proc")) -> dict[str, Any]:
    """Return the kernel's release and the settings that GPUs depend on.

    `command_line` has the words whose parameter is one of `PARAMETERS`; `is_guest` says that a hypervisor runs below.
    """
    settings = {
        "release": platform.release(),
        "command_line": [word for word in _read(proc / "cmdline").split() if _concerns_gpus(word)],
        "is_guest": "hypervisor" in _read(proc / "cpuinfo").partition("flags")[2].partition("\n")[0].split(),
    }
    numa_balancing = _read(proc / "sys/kernel/numa_balancing").strip()
    return settings | ({"numa_balancing": numa_balancing} if numa_balancing else {})


def _concerns_gpus(word: str) -> bool:
    return word.partition("=")[0].partition(".")[0] in PARAMETERS


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
