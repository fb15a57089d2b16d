"""Check nodes, GPUs and stores. Each problem becomes a finding with a remedy; this module prints nothing."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from sweeper.common.format import describe_use
from sweeper.config.hardware import FOREIGN_USE_GIB, Node
from sweeper.tracking.mlflow_store import check_uri
from workloads.api.errors import UserInputError
from workloads.tables import read_toml

# With any of these arguments on the kernel command line, GPUs access memory without address translation.
UNTRANSLATED = {"iommu=pt", "iommu.passthrough=1", "iommu=off", "amd_iommu=off", "intel_iommu=off"}
UNDIVIDED = ("SPX", "NPS1")
# GPU values that indicate problems. The worse of two readings counts.
WORSENING = ("used_gib", "processes", "links_down", "uncorrected_errors", "retired_pages")
# Other processes that use a larger share of a node's cores disturb it. A load average would count ended processes.
BUSY_SHARE, BUSY_SHARE_OF_CPU = 0.9, 0.4  # for nodes with GPUs, and for nodes without
INVENTORY = "the GPU inventory"
CHECKS = read_toml(__file__, "checks.toml")  # by kind
COUNTERS: dict[str, list[str]] = CHECKS["counters"]  # a description and a remedy, by counter
REMEDIES = read_toml(__file__, "remedies.toml")  # by GPU vendor, and for nodes


@dataclass(frozen=True)
class Finding:
    location: str  # the node, GPU or store that has the problem
    problem: str
    remedy: str
    affects_results: bool = True  # whether the problem makes measurements wrong or slow
    by_others: bool = False  # whether other processes use the part, so that its own speed is unknown


def check_nodes(node_states: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """Check each node's state, as read by `workloads.api.host`, and compare versions, drivers and GPUs across nodes."""
    for state in node_states:
        yield from check_node(str(state["node"]), state)
        yield from check_load(str(state["node"]), state)
        yield from check_counters(str(state["node"]), state)
    versions = {str(state["node"]): state["versions"] for state in node_states}
    gpus_of = {str(state["node"]): state["gpus"] for state in node_states if state["gpus"]}
    drivers = {node: {"the driver": gpus[0].get("driver", "")} for node, gpus in gpus_of.items()}
    models = {node: {INVENTORY: f"{len(gpus)} x {gpus[0]['name']}"} for node, gpus in gpus_of.items()}
    for name, common, others in chain(*map(list_differences, (versions, drivers, models))):
        problem = f"{name} is {common} on most nodes, but {others}"
        yield Finding("nodes", problem, "make them equal", affects_results=name != INVENTORY)


def list_differences(nodes: Mapping[str, Mapping[str, str]]) -> Iterator[list[str]]:
    """Yield the properties that differ between nodes: name, most common value, and the nodes with other values."""
    for name in dict.fromkeys(name for values in nodes.values() for name in values):
        value_of = {node: values.get(name) or "none" for node, values in nodes.items()}
        common = Counter(value_of.values()).most_common(1)[0][0]
        if others := [f"{node} {value}" for node, value in value_of.items() if value != common]:
            yield [name, common, ", ".join(others)]


def check_gpu_setup(nodes: Sequence[Node]) -> Iterator[Finding]:
    """Check that each node's GPUs are usable: Ray must detect the GPUs, and torch must support them."""
    for node in nodes:
        for problem in node.gpu_problems:
            yield Finding(node.label, problem.problem, problem.remedy)


def check_node(node: str, state: Mapping[str, Any]) -> Iterator[Finding]:
    """Check a node's memory, disk, processor and GPUs."""
    yield from _check_values("node", node, state, {})
    for gpu in state["gpus"]:
        yield from check_gpu(f"{node} GPU {gpu['number']}", gpu)
    amd_gpus = [gpu for gpu in state["gpus"] if gpu.get("vendor") == "amd"]
    if amd_gpus:
        yield from _check_amd(node, state["kernel"], amd_gpus)


def check_load(node: str, state: Mapping[str, Any]) -> Iterator[Finding]:
    """Check that no other processes hold the cores that measurements on a CPU, or the programs of GPUs, need."""
    limit = BUSY_SHARE if state["gpus"] else BUSY_SHARE_OF_CPU
    if (use := state.get("use", 0.0)) > limit * state["cpus"]:
        problem = describe_use(use, state.get("busiest", ""), state["cpus"])
        yield Finding(node, problem, "end them, or wait for them; top lists all", affects_results=False, by_others=True)
    if (niceness := state.get("niceness", 0)) > 0:
        problem = f"Ray's workers run at niceness {niceness}, so other processes take their cores"
        remedy = "set RAY_worker_niceness=0 for ray start, whose default is 15"
        yield Finding(node, problem, remedy, affects_results=False)


def check_counters(node: str, state: Mapping[str, Any]) -> Iterator[Finding]:
    """Report counters that rose during a test. A rise is not treated as a failure: the normal rise is unknown."""
    for name, rise in state.get("risen", {}).items():
        remedy = "check the cable and the port of the switch"
        yield Finding(node, f"{name} rose by {rise} during the test", remedy, affects_results=False)
    for gpu in state["gpus"]:
        for name, rise in gpu.get("risen", {}).items():
            counted, key = COUNTERS[name]
            remedy = remedies_of(gpu["vendor"])[key].format(number=gpu["number"])
            place = f"{node} GPU {gpu['number']}"
            yield Finding(place, f"had {rise} {counted} during the test", remedy, affects_results=False)


def has_new_use(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    """Return whether any GPU of the node has more foreign processes, or more memory in use, than before."""
    least = {"used_gib": FOREIGN_USE_GIB, "processes": 0}
    pairs = _pair_gpus(before, after)
    return any(new.get(name, 0) > old.get(name, 0) + more for old, new in pairs for name, more in least.items())


def add_changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Combine two readings of a node's state: keep the higher use, each GPU's worse errors, and each counter's rise."""
    gpus = []
    for old, new in _pair_gpus(before, after):
        gpu = old | {name: new[name] for name in WORSENING if new.get(name, 0) > old.get(name, 0)}
        counters = ({name: one[name] for name in COUNTERS if name in one} for one in (old, new))
        gpus.append({**gpu, "responds": new["responds"], "xids": new.get("xids"), "risen": _find_risen(*counters)})
    busier = max(before, after, key=lambda state: state.get("use", 0.0))
    before = {**before, **{name: busier[name] for name in ("use", "busiest") if name in busier}}
    return {**before, "gpus": gpus, "risen": _find_risen(before["network_errors"], after["network_errors"])}


def _find_risen(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    rises = {name: now - before.get(name, now) for name, now in after.items()}
    return {name: rise for name, rise in rises.items() if rise > 0}


def _pair_gpus(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield the earlier and the later state of each GPU. A GPU that is no longer listed counts as not responding."""
    later = {(gpu["vendor"], gpu["number"]): gpu for gpu in after["gpus"]}
    for gpu in before["gpus"]:
        yield gpu, later.get((gpu["vendor"], gpu["number"]), {"responds": False, "number": gpu["number"]})


def check_gpu(location: str, gpu: Mapping[str, Any]) -> Iterator[Finding]:
    """Check that a GPU responds, is unused, runs at its default power limit and clock, and has no memory errors."""
    remedies = remedies_of(gpu["vendor"])
    if not gpu["responds"]:
        yield Finding(location, "does not respond to the driver", remedies["no_response"].format(**gpu))
        return
    if gpu.get("used_gib", 0.0) > FOREIGN_USE_GIB:
        problem = f"another process uses it: {gpu['used_gib']:.1f} GiB of its memory are in use"
        yield Finding(location, problem, remedies["foreign_use"].format(**gpu), by_others=True)
    elif processes := gpu.get("processes", 0):
        problem = f"{processes} other processes use it"
        yield Finding(location, problem, remedies["foreign_use"].format(**gpu), by_others=True)
    if xids := gpu.get("xids"):
        problem = f"reported XID {', '.join(map(str, xids))} during the test"
        yield Finding(location, problem, remedies["no_response"].format(**gpu))
    yield from _check_values("gpu", location, gpu, remedies)


def _check_values(
    kind: str, location: str, values: Mapping[str, Any], remedies: Mapping[str, str]
) -> Iterator[Finding]:
    """Yield a finding for each row of checks.toml whose value is out of its bounds, if both were read."""
    for row in CHECKS[kind]:
        least, most = row.get("least", -math.inf), row.get("most", math.inf)
        value, least = values.get(row["value"]), values.get(least) if isinstance(least, str) else least
        if value is not None and least is not None and not least <= value <= most:
            remedy = remedies.get(row["remedy"], row["remedy"]).format(**values)
            yield Finding(location, row["problem"].format(**values), remedy, row["affects_results"])


def _check_amd(node: str, kernel: Mapping[str, Any], gpus: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    if kernel.get("numa_balancing", "0") != "0":
        problem = "the kernel moves memory between NUMA nodes (kernel.numa_balancing=1), which interrupts the GPUs"
        yield Finding(node, problem, "sysctl kernel.numa_balancing=0 as root; in /etc/sysctl.d to keep it")
    # In a virtual machine, only the host's kernel command line matters, and the guest cannot read it.
    if not kernel["is_guest"] and not UNTRANSLATED & set(kernel["command_line"]):
        problem = "iommu=pt is not on the kernel's command line: traffic between GPUs is slow, and RCCL may hang"
        yield Finding(node, problem, "add iommu=pt to GRUB_CMDLINE_LINUX, run update-grub, restart the node")
    # One finding covers all partitions with the same modes, because a node may have 64 partitions.
    modes = Counter((gpu.get("compute_partition"), gpu.get("memory_partition")) for gpu in gpus)
    for (compute, memory), number in modes.items():
        if compute in (None, UNDIVIDED[0]) and memory in (None, UNDIVIDED[1]):
            continue
        problem = f"{number} of its GPUs are divided ({compute or '?'}, {memory or '?'})"
        yield Finding(node, f"{problem}: each has a part of a GPU's units or memory", REMEDIES["amd_nodes"]["divided"])


def check_store(uri: str | None) -> Iterator[Finding]:
    """Check that the MLflow server at `uri` responds. Do nothing if there is no URI."""
    if uri is None:
        return
    try:
        check_uri(uri)
    except UserInputError as error:
        yield Finding("store", str(error), "start it, or set another tracking.uri=")


def remedies_of(vendor: str) -> Mapping[str, str]:
    """Return the remedies for a vendor's GPUs. For an unknown vendor, return the remedies for NVIDIA GPUs."""
    return REMEDIES.get(vendor, REMEDIES["nvidia"])
