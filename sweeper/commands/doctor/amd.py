"""Checks of a node with AMD GPUs: settings of the kernel, and GPUs that are divided into partitions.

The settings are those that AMD's cluster validation suite requires (ROCm/cvs, cvs/tests/platform/host_configs_cvs.py)
and AMD's guides to system optimization of the MI300X explain.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from sweeper.commands.doctor.findings import Finding

# Any of these words of the kernel's command line lets the GPUs reach memory without translation of addresses.
UNTRANSLATED = {"iommu=pt", "iommu.passthrough=1", "iommu=off", "amd_iommu=off", "intel_iommu=off"}
UNDIVIDED = ("SPX", "NPS1")


def check_amd_node(state: Mapping[str, Any]) -> Iterator[Finding]:
    """Check the kernel's settings and the partitions of a node; nothing for one without AMD GPUs."""
    gpus = [gpu for gpu in state["gpus"] if gpu.get("vendor") == "amd"]
    if gpus:
        yield from _check_kernel(str(state["node"]), state["kernel"])
        yield from _check_partitions(str(state["node"]), gpus)


def _check_kernel(node: str, kernel: Mapping[str, Any]) -> Iterator[Finding]:
    if kernel.get("numa_balancing", "0") != "0":
        problem = "the kernel moves memory between NUMA nodes (kernel.numa_balancing=1), which interrupts the GPUs"
        yield Finding(node, problem, "sysctl kernel.numa_balancing=0 as root; in /etc/sysctl.d to keep it")
    # In a guest the host's command line counts, which nobody here can read.
    if not kernel["is_guest"] and not UNTRANSLATED & set(kernel["command_line"]):
        problem = "iommu=pt is not on the kernel's command line: traffic between GPUs is slow, and RCCL may hang"
        yield Finding(node, problem, "add iommu=pt to GRUB_CMDLINE_LINUX, run update-grub, restart the node")


def _check_partitions(node: str, gpus: list[Mapping[str, Any]]) -> Iterator[Finding]:
    """Report each way in which GPUs are divided: one finding for all partitions, of which a node may have 64."""
    modes = Counter((gpu.get("compute_partition"), gpu.get("memory_partition")) for gpu in gpus)
    for (compute, memory), count in modes.items():
        if compute in (None, UNDIVIDED[0]) and memory in (None, UNDIVIDED[1]):
            continue
        yield Finding(
            node,
            f"{count} of its GPUs are divided ({compute or '?'}, {memory or '?'}): each has a part of a GPU's units or "
            "memory",
            "amd-smi set --gpu all --compute-partition SPX, then --memory-partition NPS1, as root on idle GPUs, "
            "unless the partitions are intended",
        )
