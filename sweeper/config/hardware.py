"""The devices of a sweep: kinds of hardware, matched against the nodes of the cluster."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from sweeper.config import partitions
from sweeper.config.catalogue import catalogue, is_kind
from sweeper.config.placement import count_placements, find_ranks_per_node
from sweeper.config.schema import Hardware
from workloads.api.errors import UserInputError
from workloads.api.gpu_setup import GpuProblem
from workloads.api.gpus import GpuIdentity

ASSUMED_GPUS_PER_NODE = 8  # of nodes that a plan assumes
FOREIGN_USE_GIB = 1.0  # below it is a display, or a process that only has the GPU open
PLANNED_ADDRESS = "planned"  # the address of a node that a plan assumes


@dataclass(frozen=True)
class Node:
    """A machine as the scheduler sees it.

    Attributes:
        accelerator: Ray's label for its GPUs.
        gpu_identities: what the driver reports of each GPU.
        gpus_used_gib: GiB that other processes use, by the driver's GPU number; known of this machine only, before a
            sweep starts.
        gpu_problems: what keeps GPUs that it has from being used.
        id: Ray's id of a node of a running cluster.
        memory_gib: what the scheduler may give out; None before a cluster runs.
        gpu_domain: Ray's label of the NVLink domain that the node shares with others, as of GB200 NVL72.
        code_problem: why it cannot run the sweep's code, for a node that joins.
        environment: those variables of its processes that `discover_nodes` was called with.
    """

    address: str
    cpus: int
    cpu_name: str
    gpus: int = 0
    accelerator: str | None = None
    gpu_identities: tuple[GpuIdentity, ...] = ()
    gpus_used_gib: tuple[tuple[int, float], ...] = ()
    gpu_problems: tuple[GpuProblem, ...] = ()
    id: str | None = None
    cpu_architecture: str = "cpu"
    memory_gib: float | None = None
    gpu_domain: str | None = None
    environment: tuple[tuple[str, str], ...] = ()
    code_problem: str = ""

    def capacity(self, host_gib: float) -> int:
        """Return how many processes fit that take a GPU and `host_gib` of memory each."""
        if not host_gib or self.memory_gib is None:
            return self.gpus
        return min(self.gpus, int(self.memory_gib / host_gib))

    @property
    def model(self) -> str | None:
        """The name of its GPUs, the driver's if known, else Ray's label, with the modes in which they are divided."""
        if not self.gpu_identities:
            return self.accelerator
        modes = partitions.partition_of(self.gpu_identities[0])
        return " ".join(filter(None, (self.gpu_identities[0].name, modes)))

    @property
    def partitions(self) -> set[str]:
        """The partition modes of its GPUs, such as CPX/NPS4."""
        modes = {partitions.partition_of(gpu) for gpu in self.gpu_identities} or {None}
        return {mode or partitions.UNDIVIDED for mode in modes}

    @property
    def cpu_model(self) -> str:
        """The processor's name with the number of cores."""
        return f"{self.cpu_name} ({self.cpus} cores)"

    @property
    def label(self) -> str:
        """The address, with the start of Ray's id: several nodes may share an address."""
        return f"{self.address} ({self.id[:8]})" if self.id else self.address


@dataclass(frozen=True)
class Target:
    """The devices of a sweep: one model of one kind of hardware, and the nodes that have it."""

    hardware: Hardware
    model: str
    nodes: tuple[Node, ...]

    @property
    def is_gpu(self) -> bool:
        return self.hardware.kind == "gpu"

    @property
    def is_planned(self) -> bool:
        """Return whether the devices are assumed by a plan and do not exist in the cluster."""
        return self.nodes[0].address == PLANNED_ADDRESS

    @property
    def devices(self) -> int:
        """The number of GPUs, or on a CPU of cores."""
        return sum(node.gpus if self.is_gpu else node.cpus for node in self.nodes)

    @property
    def architecture(self) -> str | None:
        """The architecture as in `workloads.api.recipes`; None for a GPU that the catalogue lacks."""
        return self.hardware.architecture if self.is_gpu else self.nodes[0].cpu_architecture

    @property
    def unit(self) -> str:
        return "GPUs" if self.is_gpu else "CPU cores"

    def least_memory_gib(self) -> float:
        """Return the memory of the smallest node; 0 if unknown."""
        return min((node.memory_gib or 0.0 for node in self.nodes), default=0.0)

    def count_gangs(
        self, ranks: int, requested: int | None, *, whole_nodes: bool = False, host_gib: float = 0.0
    ) -> int:
        """Return how many gangs of `ranks` run at once: as requested, else one for each `ranks` GPUs; on a CPU one.

        On a CPU, concurrent trials would disturb each other's timings.

        Args:
            whole_nodes: no two gangs share a node.
            host_gib: memory of its node that each process takes.

        Raises:
            UserInputError: if more are requested than fit.
        """
        limit = self.devices // ranks
        if self.is_gpu and self.nodes:
            limit = count_placements(ranks, self._capacities(host_gib))
            if whole_nodes:
                limit = len(self.nodes) // -(-ranks // min(node.gpus for node in self.nodes))
            limit = min(limit, self._count_in_domains(ranks, host_gib) or limit)
        if requested is not None and requested > limit:
            reason = (
                " with exclusive=node" if whole_nodes else f" with {host_gib:g} GiB of memory each" if host_gib else ""
            )
            raise UserInputError(
                f"cluster.max_concurrent_trials={requested}: at most {limit} fit on {self.devices} {self.unit}{reason}"
            )
        return requested or (limit if self.is_gpu else 1)

    def ranks_per_node(self, ranks: int, host_gib: float = 0.0) -> int:
        """Return how many ranks of a gang share a node; of a gang that does not fit, as many as the largest node has.

        Args:
            host_gib: memory of its node that each process takes.
        """
        if not self.is_gpu:
            return min(ranks, max(node.cpus for node in self.nodes))
        most = max(node.gpus for node in self.nodes)
        return find_ranks_per_node(ranks, self._capacities(host_gib)) or min(ranks, most)

    def devices_per_node(self, ranks: int) -> int:
        """Return the GPUs of a node, eight of a planned one; on a CPU the ranks of a trial, which share it."""
        if not self.is_gpu:
            return ranks
        if self.is_planned:
            return ASSUMED_GPUS_PER_NODE * partitions.devices_per_gpu(self.hardware)
        return max(node.gpus for node in self.nodes)

    def fits_gpu_domain(self, ranks: int, host_gib: float = 0.0) -> bool:
        """Return whether a gang that needs several nodes fits into one NVLink domain of several nodes."""
        return self._count_in_domains(ranks, host_gib) > 0

    def _count_in_domains(self, ranks: int, host_gib: float) -> int:
        """Return how many gangs over several nodes fit at once, each within one NVLink domain."""
        share = self.ranks_per_node(ranks, host_gib)
        capacities: dict[str, list[int]] = {}
        for node in self.nodes:
            if node.gpu_domain:
                capacities.setdefault(node.gpu_domain, []).append(node.capacity(host_gib))
        return sum(count_placements(ranks, domain, share) for domain in capacities.values()) if share < ranks else 0

    def _capacities(self, host_gib: float) -> list[int]:
        return [node.capacity(host_gib) for node in self.nodes]

    def describe_foreign_use(self) -> list[str]:
        """Return a line for each GPU of the target whose memory other processes use."""
        return [
            f"other processes use {gib:.1f} GiB of GPU {number}; results will be skewed (see nvidia-smi, amd-smi)"
            for node in self.nodes
            for number, gib in node.gpus_used_gib
            if gib > FOREIGN_USE_GIB and self.is_gpu
        ]

    def with_nodes(self, nodes: Iterable[Node]) -> Target:
        """Return the target with those of these nodes that have the same devices."""
        return replace(self, nodes=(*self.nodes, *(node for node in nodes if self._has_same_devices(node))))

    def without_nodes(self, ids: Collection[str]) -> Target:
        """Return the target without the nodes that have these Ray ids."""
        return replace(self, nodes=tuple(node for node in self.nodes if node.id not in ids))

    def _has_same_devices(self, node: Node) -> bool:
        if self.is_gpu:
            is_same_kind = has_hardware(node, self.hardware) and node.partitions == self.nodes[0].partitions
            is_usable = node.gpu_problems in ((), self.nodes[0].gpu_problems)
            return is_same_kind and is_usable and node.model == self.model
        return node.cpu_model == self.model

    def cores_of_whole_nodes(self, ranks: int) -> int:
        """Return the cores for each rank of a gang that leaves none on its nodes, which are taken to be equal."""
        return max(1, min(node.cpus // min(ranks, max(1, node.gpus)) for node in self.nodes))

    def cores_per_rank(self, ranks: int) -> int:
        """Return the most cores that each of `ranks` processes can have, none of which spans two nodes."""
        cores = max(node.cpus for node in self.nodes)
        while cores > 1 and sum(node.cpus // cores for node in self.nodes) < ranks:
            cores -= 1
        return cores


def has_hardware(node: Node, hardware: Hardware) -> bool:
    """Return whether the node's GPUs are of this kind: by PCI id, else by the driver's name, else by Ray's label."""
    if not node.gpus:
        return False
    if node.gpu_identities:
        models = {(gpu.device_id, gpu.name): gpu for gpu in node.gpu_identities}  # as a rule one, of many GPUs
        return all(is_kind(gpu, node.accelerator, hardware) for gpu in models.values())
    return node.accelerator in hardware.accelerators


def hardware_of(node: Node) -> Hardware:
    """Return the catalogue's entry for a node's GPUs, or one without peaks for an unknown GPU."""
    for entry in catalogue().values():
        if has_hardware(node, entry):
            return entry
    name = re.sub(r"[^a-z0-9]+", "_", (node.model or "gpu").lower()).strip("_")
    return Hardware(
        name=name,
        accelerators=[node.accelerator] if node.accelerator else [],
        device_names=sorted({f"^{re.escape(gpu.name)}$" for gpu in node.gpu_identities}),
    )


def select_target(hardware: Hardware, nodes: Sequence[Node], gpus: int) -> Target:
    """Return the nodes that a sweep for this hardware runs on.

    Raises:
        UserInputError: if the cluster has none of it, several kinds for `auto`, or fewer devices than `gpus`.
    """
    if hardware.kind == "cpu" or (hardware.name == "auto" and not any(node.gpus for node in nodes)):
        target = _select_cpus(nodes)
    else:
        target = _select_gpus(hardware, nodes)
    if gpus > target.devices:
        hint = "" if target.is_gpu else ", one for each process"
        raise UserInputError(f"gpus={gpus}: the cluster has {target.devices} {target.unit} ({target.model}){hint}")
    return target


def planned_target(hardware: Hardware, gpus: int) -> Target:
    """Return as many GPUs of the catalogue as a trial needs, in nodes of eight: a plan's devices need not exist.

    Raises:
        UserInputError: these GPUs have no such partitions.
    """
    partitions.check_partition(hardware)
    hardware = _without_default(hardware)
    gpus_per_node = ASSUMED_GPUS_PER_NODE * partitions.devices_per_gpu(hardware)
    nodes, per_node = -(-gpus // gpus_per_node), min(gpus, gpus_per_node)
    node = Node(PLANNED_ADDRESS, cpus=0, cpu_name="", gpus=per_node, accelerator=hardware.name)
    model = " ".join(filter(None, (hardware.name, hardware.partition)))
    return Target(partitions.divide(hardware), model, (node,) * nodes)


def _select_cpus(nodes: Sequence[Node]) -> Target:
    # Different processors do not belong into one study: take the most frequent model.
    model = Counter(node.cpu_name for node in nodes).most_common(1)[0][0]
    selected = tuple(node for node in nodes if node.cpu_name == model)
    return Target(Hardware(name="cpu", kind="cpu"), selected[0].cpu_model, selected)


def _select_gpus(hardware: Hardware, nodes: Sequence[Node]) -> Target:
    with_gpus = [node for node in nodes if node.gpus]
    if hardware.name == "auto":
        kinds = {entry.name: entry for entry in map(hardware_of, with_gpus)}
        if len(kinds) > 1:
            raise UserInputError(
                f"hardware=auto: the cluster has {describe_inventory(nodes)}; choose hardware={'|'.join(kinds)}"
            )
        hardware, selected = replace(next(iter(kinds.values())), partition=hardware.partition), with_gpus
    else:
        selected = [node for node in with_gpus if has_hardware(node, hardware)]
        if not selected:
            raise UserInputError(f"hardware={hardware.name}: not in the cluster, which has {describe_inventory(nodes)}")
    selected = _select_partition(hardware, selected)
    return Target(_describe_devices(hardware, selected), selected[0].model or hardware.name, tuple(selected))


def _select_partition(hardware: Hardware, nodes: Sequence[Node]) -> list[Node]:
    """Return the nodes whose GPUs are in the partition mode that the configuration asks for.

    Raises:
        UserInputError: none are, or the configuration asks for none and they differ.
    """
    partitions.check_partition(hardware)
    modes = sorted(set[str]().union(*(node.partitions for node in nodes)))
    if hardware.partition is None and len(modes) > 1:
        raise UserInputError(
            f"hardware={hardware.name}: its GPUs are in different partition modes, {' and '.join(modes)}, which do not"
            f" compare; set hardware.partition={'|'.join(modes)}"
        )
    selected = [node for node in nodes if node.partitions == {hardware.partition or modes[0]}]
    if not selected:
        raise UserInputError(
            f"hardware.partition={hardware.partition}: no node has all of its GPUs in it; the cluster has"
            f" {', '.join(modes)}"
        )
    return selected


def _describe_devices(hardware: Hardware, nodes: Sequence[Node]) -> Hardware:
    """Return what one device of these nodes has, by the catalogue and by what the driver reports of the smallest."""
    gpus = [gpu for node in nodes for gpu in node.gpu_identities]
    units = min((gpu.compute_units for gpu in gpus if gpu.compute_units), default=None)
    memory_gib = min((gpu.memory_gib for gpu in gpus if gpu.memory_gib), default=None)
    modes = partitions.partition_of(gpus[0]) if gpus else None
    return partitions.divide(replace(hardware, partition=modes), units, memory_gib)


def _without_default(hardware: Hardware) -> Hardware:
    return replace(hardware, partition=None) if hardware.partition == partitions.UNDIVIDED else hardware


def describe_inventory(nodes: Iterable[Node]) -> str:
    """Return what a cluster has: `8 x NVIDIA H200 (hardware=h200), 64 CPU cores (hardware=cpu)`."""
    nodes = list(nodes)
    gpus: Counter[tuple[str, str]] = Counter()
    for node in nodes:
        if node.gpus:
            gpus[(node.model or "GPU", hardware_of(node).name)] += node.gpus
    parts = [f"{count} x {model} (hardware={name})" for (model, name), count in gpus.items()]
    return ", ".join([*parts, f"{sum(node.cpus for node in nodes)} CPU cores (hardware=cpu)"])
