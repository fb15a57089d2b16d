"""The devices of a sweep: the nodes with one kind of hardware, and the number of trials that fit on them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from sweeper.common.grouping import group_values
from sweeper.config.catalogue import UNDIVIDED, catalogue, devices_per_gpu, is_kind, partition_of
from sweeper.config.schema import Hardware
from workloads.api.errors import UserInputError
from workloads.api.gpu_setup import GpuProblem
from workloads.api.gpus import GpuIdentity

ASSUMED_GPUS_PER_NODE = 8  # on nodes that do not exist and are only planned
FOREIGN_USE_GIB = 1.0  # a display, or an idle process with a GPU context, uses less
PLANNED_ADDRESS = "planned"  # the address of a node that a plan assumes


@dataclass(frozen=True)
class Node:
    address: str
    cpus: int  # the cores that a sweep uses
    cpu_name: str
    gpus: int = 0
    accelerator: str | None = None  # Ray's label for the node's GPUs
    gpu_identities: tuple[GpuIdentity, ...] = ()  # the driver's report on each GPU
    gpus_used_gib: tuple[tuple[int, float], ...] = ()  # GPU number and GiB in use before a local sweep
    gpu_problems: tuple[GpuProblem, ...] = ()  # why the node's GPUs cannot be used
    id: str | None = None  # Ray's node id, if the cluster is running
    cpu_architecture: str = "cpu"
    memory_gib: float | None = None  # memory that the scheduler may assign; None before the cluster starts
    gpu_domain: str | None = None  # Ray's label for an NVLink domain that nodes share, as in a GB200 NVL72
    environment: tuple[tuple[str, str], ...] = ()  # the variables that `discover_nodes` was asked to read
    code_problem: str = ""  # why a joining node cannot run the sweep's code
    idle_cpus: int = 0  # cores that a sweep leaves to other processes

    def using(self, cpus: int) -> Node:
        """Return the node with only this many cores in use."""
        return replace(self, cpus=cpus, idle_cpus=self.cpus + self.idle_cpus - cpus)

    def capacity(self, host_gib: float) -> int:
        """Return the number of processes that fit if each takes one GPU and `host_gib` of host memory."""
        if not host_gib or self.memory_gib is None:
            return self.gpus
        return min(self.gpus, int(self.memory_gib / host_gib))

    @property
    def model(self) -> str | None:
        """The driver's name for the node's GPUs, with any partition modes, or Ray's label if that name is unknown."""
        if not self.gpu_identities:
            return self.accelerator
        return " ".join(filter(None, (self.gpu_identities[0].name, partition_of(self.gpu_identities[0]))))

    @property
    def partitions(self) -> set[str]:
        """The partition modes of the node's GPUs, such as CPX/NPS4."""
        return {mode or UNDIVIDED for mode in {partition_of(gpu) for gpu in self.gpu_identities} or {None}}

    @property
    def cpu_model(self) -> str:
        all_cpus = f" of {self.cpus + self.idle_cpus}" if self.idle_cpus else ""
        return f"{self.cpu_name} ({self.cpus}{all_cpus} cores)"

    @property
    def label(self) -> str:
        """The address followed by the start of Ray's node id, because several nodes may share an address."""
        return f"{self.address} ({self.id[:8]})" if self.id else self.address


@dataclass(frozen=True)
class Target:
    """The devices of a sweep: one device model, and the nodes that have it."""

    hardware: Hardware
    model: str
    nodes: tuple[Node, ...]

    @property
    def is_gpu(self) -> bool:
        return self.hardware.kind == "gpu"

    @property
    def is_planned(self) -> bool:
        """Whether these devices are only assumed by a plan and not in the cluster."""
        return self.nodes[0].address == PLANNED_ADDRESS

    @property
    def devices(self) -> int:
        """The number of GPUs or, for a CPU target, of cores."""
        return sum(node.gpus if self.is_gpu else node.cpus for node in self.nodes)

    @property
    def architecture(self) -> str | None:
        """The architecture, named as in `workloads.api.recipes`, or None for a GPU that is not in the catalog."""
        return self.hardware.architecture if self.is_gpu else self.nodes[0].cpu_architecture

    @property
    def unit(self) -> str:
        return "GPUs" if self.is_gpu else "CPU cores"

    def least_memory_gib(self) -> float:
        """Return the smallest host memory of any node, or 0 if unknown."""
        return min((node.memory_gib or 0.0 for node in self.nodes), default=0.0)

    def count_gangs(
        self, ranks: int, requested: int | None, *, whole_nodes: bool = False, host_gib: float = 0.0
    ) -> int:
        """Return how many gangs of `ranks` run at once: by default all that fit, but only one on a CPU.

        Running one gang at a time keeps CPU timings undisturbed. With `whole_nodes`, no two gangs share a node. Each
        process takes `host_gib` of host memory. Raises UserInputError if more gangs are `requested` than fit.
        """
        limit = self.devices // ranks
        if self.is_gpu and self.nodes:
            limit = count_placements(ranks, self._capacities(host_gib))
            if whole_nodes:
                limit = len(self.nodes) // -(-ranks // min(node.gpus for node in self.nodes))
            limit = min(limit, self._count_in_domains(ranks, host_gib) or limit)
        if requested is not None and requested > limit:
            reason = f" with {host_gib:g} GiB of memory each" if host_gib else ""
            reason = " with exclusive=node" if whole_nodes else reason
            most = f"at most {limit} fit on {self.devices} {self.unit}{reason}"
            raise UserInputError(f"cluster.max_concurrent_trials={requested}: {most}")
        return requested or (limit if self.is_gpu else 1)

    def ranks_per_node(self, ranks: int, host_gib: float = 0.0) -> int:
        """Return how many ranks of a gang share a node. If it does not fit, return what the largest node holds."""
        if not self.is_gpu:
            return min(ranks, max(node.cpus for node in self.nodes))
        most = max(node.gpus for node in self.nodes)
        return find_ranks_per_node(ranks, self._capacities(host_gib)) or min(ranks, most)

    def devices_per_node(self, ranks: int) -> int:
        """Return the number of GPUs per node (eight if planned). For a CPU, return `ranks`, which share one node."""
        if not self.is_gpu:
            return ranks
        if self.is_planned:
            return ASSUMED_GPUS_PER_NODE * devices_per_gpu(self.hardware)
        return max(node.gpus for node in self.nodes)

    def fits_gpu_domain(self, ranks: int, host_gib: float = 0.0) -> bool:
        """Return whether a gang needs several nodes and fits into one NVLink domain."""
        return self._count_in_domains(ranks, host_gib) > 0

    def _count_in_domains(self, ranks: int, host_gib: float) -> int:
        share = self.ranks_per_node(ranks, host_gib)
        capacities = group_values((node.gpu_domain, node.capacity(host_gib)) for node in self.nodes if node.gpu_domain)
        return sum(count_placements(ranks, domain, share) for domain in capacities.values()) if share < ranks else 0

    def _capacities(self, host_gib: float) -> list[int]:
        return [node.capacity(host_gib) for node in self.nodes]

    def describe_foreign_use(self) -> list[str]:
        return [
            f"other processes use {gib:.1f} GiB of GPU {number}; results will be skewed (see nvidia-smi, amd-smi)"
            for node in self.nodes
            for number, gib in node.gpus_used_gib
            if gib > FOREIGN_USE_GIB and self.is_gpu
        ]

    def with_nodes(self, nodes: Iterable[Node]) -> Target:
        """Return the target extended by those `nodes` that have the same devices."""
        return replace(self, nodes=(*self.nodes, *filter(self._has_same_devices, nodes)))

    def without_nodes(self, ids: Collection[str]) -> Target:
        return replace(self, nodes=tuple(node for node in self.nodes if node.id not in ids))

    def _has_same_devices(self, node: Node) -> bool:
        if not self.is_gpu:
            return node.cpu_model == self.model
        is_same_kind = has_hardware(node, self.hardware) and node.partitions == self.nodes[0].partitions
        return is_same_kind and node.gpu_problems in ((), self.nodes[0].gpu_problems) and node.model == self.model

    def cores_of_whole_nodes(self, ranks: int) -> int:
        """Return the cores per rank if a gang uses whole nodes, sized for the node with the fewest cores per rank."""
        return max(1, min(node.cpus // min(ranks, max(1, node.gpus)) for node in self.nodes))

    def cores_per_rank(self, ranks: int) -> int:
        """Return the most cores that each of `ranks` processes can have, given that no process spans two nodes."""
        shares = range(max(node.cpus for node in self.nodes), 0, -1)
        return next((n for n in shares if sum(node.cpus // n for node in self.nodes) >= ranks), 1)


def has_hardware(node: Node, hardware: Hardware) -> bool:
    """Return whether a node's GPUs are of this kind, judging by PCI id, then driver name, then Ray's label."""
    if not node.gpus:
        return False
    if node.gpu_identities:
        models = {(gpu.device_id, gpu.name): gpu for gpu in node.gpu_identities}  # usually all GPUs are alike
        return all(is_kind(gpu, node.accelerator, hardware) for gpu in models.values())
    return node.accelerator in hardware.accelerators


def hardware_of(node: Node) -> Hardware:
    """Return the catalog entry for a node's GPUs, or an entry without peaks for an unknown GPU."""
    for entry in catalogue().values():
        if has_hardware(node, entry):
            return entry
    name = re.sub(r"[^a-z0-9]+", "_", (node.model or "gpu").lower()).strip("_")
    return Hardware(
        name=name,
        accelerators=[node.accelerator] if node.accelerator else [],
        device_names=sorted({f"^{re.escape(gpu.name)}$" for gpu in node.gpu_identities}),
    )


def find_ranks_per_node(ranks: int, capacities: Sequence[int]) -> int | None:
    """Return how many ranks of a gang to place on each node, or None if the gang does not fit.

    Choose the largest divisor of `ranks` for which enough nodes have room, so a gang that fits on one node stays on
    one. `capacities` lists how many ranks fit on each node."""
    divisors = (share for share in range(ranks, 0, -1) if ranks % share == 0)
    return next((n for n in divisors if sum(capacity >= n for capacity in capacities) >= ranks // n), None)


def count_placements(ranks: int, capacities: Sequence[int], share: int | None = None) -> int:
    """Return how many gangs fit at once with `share` ranks per node (default: the result of `find_ranks_per_node`)."""
    share = share or find_ranks_per_node(ranks, capacities)
    if share is None:
        return 0
    nodes_per_gang = ranks // share
    shares = [capacity // share for capacity in capacities]
    gangs = sum(shares) // nodes_per_gang
    # A gang takes at most one share from a node, so a node with many shares cannot host a gang alone.
    while sum(min(count, gangs) for count in shares) < gangs * nodes_per_gang:
        gangs -= 1
    return gangs
