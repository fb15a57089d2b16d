"""Checks of nodes, GPUs, stores and trial results. Each problem is a finding with its remedy; nothing is printed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sweeper.common.trials import TrialRecord, TrialResult, TrialStatus
from sweeper.config.hardware import FOREIGN_USE_GIB, Node
from sweeper.pages import per_gpu
from sweeper.tracking.mlflow_store import check_uri
from workloads.api.errors import UserInputError

MIN_SHARED_MEMORY_GIB = 2.0
MIN_FREE_MEMORY_GIB = 8.0
MIN_FREE_DISK_GIB = 5.0
MIN_RELATIVE_RATE = 0.95  # of the median GPU's rate


def check_nodes(node_states: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """Check each node, and that the nodes have equal versions, drivers and GPUs.

    Args:
        node_states: as `workloads.api.host` returns them, one for each node.
    """
    for state in node_states:
        yield from _check_node(state)
    for package in sorted({package for state in node_states for package in state["versions"]}):
        versions = {str(state["node"]): state["versions"].get(package, "") for state in node_states}
        yield from _check_equal(package, versions)
    first_gpus = {str(state["node"]): state["gpus"][0] for state in node_states if state["gpus"]}
    yield from _check_equal("the driver", {node: gpu.get("driver", "") for node, gpu in first_gpus.items()})
    counts = {str(state["node"]): len(state["gpus"]) for state in node_states}
    models = {node: f"{counts[node]} x {gpu['name']}" for node, gpu in first_gpus.items()}
    yield from _check_equal("the GPU inventory", models, affects_results=False)


def check_gpu_setup(nodes: Sequence[Node]) -> Iterator[Finding]:
    """Check that each node's GPUs can be used: Ray sees them, and torch is built for them."""
    for node in nodes:
        for problem in node.gpu_problems:
            yield Finding(node.label, problem.problem, problem.remedy)


def _check_node(state: Mapping[str, Any]) -> Iterator[Finding]:
    node = str(state["node"])
    if state["shared_gib"] < MIN_SHARED_MEMORY_GIB:
        yield Finding(
            node,
            f"/dev/shm has {state['shared_gib']:.1f} GiB; NCCL and data loaders need at least "
            f"{MIN_SHARED_MEMORY_GIB:g} GiB",
            "docker run --shm-size=16g, or an emptyDir of medium Memory at /dev/shm",
        )
    if state["free_gib"] < MIN_FREE_MEMORY_GIB:
        problem = f"only {state['free_gib']:.1f} GiB of memory are free"
        yield Finding(node, problem, "check which other processes run there", affects_results=False)
    if state["disk_gib"] < MIN_FREE_DISK_GIB:
        problem = f"only {state['disk_gib']:.1f} GiB of disk are free"
        yield Finding(node, problem, "free some space, or set another dir=", affects_results=False)
    for gpu in state["gpus"]:
        yield from check_gpu(f"{node} GPU {gpu['number']}", gpu)
    yield from check_amd_node(state)


def check_gpu(location: str, gpu: Mapping[str, Any]) -> Iterator[Finding]:
    """Check that a GPU responds, is unused, runs at its default power limit and clock, and has no memory errors."""
    remedies, number = remedies_of(gpu["vendor"]), gpu["number"]
    if not gpu["responds"]:
        yield Finding(location, "does not respond to the driver", remedies.no_response.format(number=number))
        return
    if gpu.get("used_gib", 0.0) > FOREIGN_USE_GIB:
        problem = f"{gpu['used_gib']:.1f} GiB of its memory are in use"
        yield Finding(location, problem, remedies.foreign_use.format(number=number))
    limit_w, default_w = gpu.get("power_limit_w", 0), gpu.get("power_default_w", 0)
    if limit_w < default_w:
        problem = f"its power is limited to {limit_w:.0f} W of {default_w:.0f} W"
        yield Finding(location, problem, remedies.power_limit.format(number=number, watts=default_w))
    if gpu.get("clock_limit_mhz", 0) < gpu.get("clock_default_mhz", 0):
        problem = f"its clock is limited to {gpu['clock_limit_mhz']} MHz of {gpu['clock_default_mhz']} MHz"
        yield Finding(location, problem, remedies.clock_limit.format(number=number))
    if errors := gpu.get("uncorrected_errors", 0):
        yield Finding(location, f"has {errors} uncorrected memory errors", "take it out of service")
    if pages := gpu.get("retired_pages", 0):
        problem = f"{pages} pages of its memory are retired because of errors"
        yield Finding(location, problem, remedies.retired_pages.format(number=number), affects_results=False)


def _check_equal(name: str, value_by_node: Mapping[str, str], *, affects_results: bool = True) -> Iterator[Finding]:
    """Report the nodes whose value differs from the most common one."""
    counts = Counter(value_by_node.values())
    if len(counts) < 2:
        return
    common = counts.most_common(1)[0][0]
    outliers = ", ".join(f"{node} {value or 'none'}" for node, value in value_by_node.items() if value != common)
    problem = f"{name} is {common or 'none'} on most nodes, but {outliers}"
    yield Finding("nodes", problem, "make them equal", affects_results)


def check_store(uri: str | None) -> Iterator[Finding]:
    """Check that the MLflow server at `uri` responds, if one is given."""
    if uri is None:
        return
    try:
        check_uri(uri)
    except UserInputError as error:
        yield Finding("store", str(error), "start it, or set another tracking.uri=")


def check_trial(name: str, result: TrialResult) -> Iterator[Finding]:
    """Check that the trial called `name` is complete."""
    if result.status is not TrialStatus.COMPLETE:
        remedy = result.detail[-300:] or "see Ray's logs"
        yield Finding("cluster", f"{name} {result.status.value}: {result.reason}", remedy)


def check_relative_rates(result: TrialResult, vendor: str) -> Iterator[Finding]:
    """Check that no GPU of a complete matmul trial is slower than `MIN_RELATIVE_RATE` of the median GPU."""
    record = TrialRecord(
        number=0,
        params={},
        status=result.status,
        reason="",
        detail="",
        metrics={},
        measurements=[asdict(measurement) for measurement in result.measurements],
        where=result.where,
        started_at_s=result.started_at_s,
        ended_at_s=result.ended_at_s,
        elapsed_s=0.0,
    )
    for member in per_gpu.per_gpu_results([record]):
        if member.relative < MIN_RELATIVE_RATE:
            yield Finding(
                f"{member.host} {member.gpu}",
                f"its matrix products run at {member.relative:.2f} of the median GPU's rate",
                remedies_of(vendor).slow,
            )


@dataclass(frozen=True)
class Finding:
    """A problem and its remedy.

    Attributes:
        location: the node, GPU or store that has the problem.
        affects_results: measurements are wrong or slow because of it.
    """

    location: str
    problem: str
    remedy: str
    affects_results: bool = True


@dataclass(frozen=True)
class Remedies:
    """The remedies for one vendor's GPUs; `{number}` and `{watts}` are the GPU's number and its default power limit."""

    no_response: str
    foreign_use: str
    power_limit: str
    clock_limit: str
    retired_pages: str
    slow: str


REMEDIES = {
    "nvidia": Remedies(
        no_response="look for its Xid error in dmesg; reset the GPU or restart the node",
        foreign_use="run nvidia-smi to see which processes use it",
        power_limit="nvidia-smi -i {number} -pl {watts:.0f}, unless the limit is intended",
        clock_limit="nvidia-smi -i {number} -rac, unless the limit is intended",
        retired_pages="nvidia-smi -i {number} -q -d PAGE_RETIREMENT; replace it if their number grows",
        slow="compare its clock, power and temperature (nvidia-smi -q -d PERFORMANCE,CLOCK,TEMPERATURE)",
    ),
    # amd-smi comes with ROCm 6 and later; rocm-smi does the same in older releases.
    "amd": Remedies(
        no_response="look for errors of amdgpu in dmesg; amd-smi reset --gpu {number} --gpureset, or restart the node",
        foreign_use="run amd-smi process --gpu {number} (rocm-smi --showpids) to see which processes use it",
        power_limit="amd-smi set --gpu {number} --power-cap {watts:.0f}, unless the limit is intended",
        clock_limit="amd-smi reset --gpu {number} --clocks, unless the limit is intended",
        retired_pages="amd-smi bad-pages --gpu {number} lists them; replace it if their number grows",
        slow="compare its clock, power and temperature (amd-smi metric --clock --power --temperature)",
    ),
}


def remedies_of(vendor: str) -> Remedies:
    """Return the remedies for GPUs of a vendor; NVIDIA's for an unknown one."""
    return REMEDIES.get(vendor, REMEDIES["nvidia"])


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
