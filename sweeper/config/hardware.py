"""The devices of a sweep: the catalogue in `conf/hardware/`, matched against the nodes of the cluster."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from omegaconf import OmegaConf

from sweeper.common.errors import UserInputError
from sweeper.config.resolution import CONF
from sweeper.config.schema import Hardware
from sweeper.config.validation import build
from workloads.api.gpu_setup import GpuProblem
from workloads.api.gpus.interface import GpuIdentity

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

    def capacity(self, host_gib: float) -> int:
        """Return how many processes fit that take a GPU and `host_gib` of memory each."""
        if not host_gib or self.memory_gib is None:
            return self.gpus
        return min(self.gpus, int(self.memory_gib / host_gib))

    @property
    def model(self) -> str | None:
        """The name of its GPUs: the driver's if known, else Ray's label."""
        return self.gpu_identities[0].name if self.gpu_identities else self.accelerator

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
        limit = (sum(node.capacity(host_gib) for node in self.nodes) if self.is_gpu else self.devices) // ranks
        if whole_nodes and self.is_gpu and self.nodes:
            limit = len(self.nodes) // -(-ranks // min(node.gpus for node in self.nodes))
        if requested is not None and requested > limit:
            reason = (
                " with exclusive=node" if whole_nodes else f" with {host_gib:g} GiB of memory each" if host_gib else ""
            )
            raise UserInputError(
                f"cluster.max_concurrent_trials={requested}: at most {limit} fit on {self.devices} {self.unit}{reason}"
            )
        return requested or (limit if self.is_gpu else 1)

    def describe_foreign_use(self) -> list[str]:
        """Return a line for each GPU of the target whose memory other processes use."""
        return [
            f"other processes use {gib:.1f} GiB of GPU {number}; results will be skewed (see nvidia-smi)"
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
            return has_hardware(node, self.hardware) and node.model == self.model
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


@cache
def catalogue() -> dict[str, Hardware]:
    """Return every kind of GPU in `conf/hardware/` by its name."""
    entries = {}
    for path in sorted((CONF / "hardware").glob("*.yaml")):
        values = OmegaConf.to_container(OmegaConf.load(path))
        assert isinstance(values, dict)
        entry = build(Hardware, {str(key): value for key, value in values.items()}, f"{path.name}: ")
        if entry.kind == "gpu" and entry.name != "auto":
            entries[entry.name] = entry
    return entries


def has_hardware(node: Node, hardware: Hardware) -> bool:
    """Return whether the node's GPUs are of this kind: by PCI id, else by the driver's name, else by Ray's label."""
    if not node.gpus:
        return False
    if node.gpu_identities:
        return all(_is_kind(gpu, node.accelerator, hardware) for gpu in node.gpu_identities)
    return node.accelerator in hardware.accelerators


def _is_kind(gpu: GpuIdentity, label: str | None, hardware: Hardware) -> bool:
    """Return whether a GPU is of this kind.

    Virtual functions have names and ids of their own. Ray reads its label of an AMD GPU from the id, which AMD SMI may
    report where it reports no name; its labels of NVIDIA's GPUs leave out the form, on which the peaks depend.
    """
    device_id = (gpu.device_id or "").lower().removeprefix("0x")
    if any(device_id in entry.device_ids for entry in (hardware, *catalogue().values())):
        return device_id in hardware.device_ids
    if find_hardware(gpu.name) or _has_name(hardware, gpu.name):
        return _has_name(hardware, gpu.name)
    return gpu.vendor == "amd" and label in hardware.accelerators


def _has_name(hardware: Hardware, device_name: str) -> bool:
    return any(re.search(pattern, device_name) for pattern in hardware.device_names)


def hardware_of(node: Node) -> Hardware:
    """Return the catalogue's entry for a node's GPUs, or one without peaks for an unknown GPU."""
    for entry in catalogue().values():
        if has_hardware(node, entry):
            return entry
    name = re.sub(r"[^a-z0-9]+", "_", (node.model or "gpu").lower()).strip("_")
    return Hardware(name=name, accelerators=[node.accelerator] if node.accelerator else [])


def find_hardware(device_name: str) -> Hardware | None:
    """Return the catalogue's entry for a driver's or Ray's name of a GPU; None if it has none."""
    for entry in catalogue().values():
        if device_name in entry.accelerators or _has_name(entry, device_name):
            return entry
    return None


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
    """Return as many GPUs of the catalogue as a trial needs, in nodes of eight: a plan's devices need not exist."""
    nodes = -(-gpus // ASSUMED_GPUS_PER_NODE)
    per_node = min(gpus, ASSUMED_GPUS_PER_NODE)
    node = Node(PLANNED_ADDRESS, cpus=0, cpu_name="", gpus=per_node, accelerator=hardware.name)
    return Target(hardware, hardware.name, (node,) * nodes)


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
        hardware, selected = next(iter(kinds.values())), with_gpus
    else:
        selected = [node for node in with_gpus if has_hardware(node, hardware)]
        if not selected:
            raise UserInputError(f"hardware={hardware.name}: not in the cluster, which has {describe_inventory(nodes)}")
    return Target(hardware, selected[0].model or hardware.name, tuple(selected))


def describe_inventory(nodes: Iterable[Node]) -> str:
    """Return what a cluster has: `8 x NVIDIA H200 (hardware=h200), 64 CPU cores (hardware=cpu)`."""
    nodes = list(nodes)
    gpus: Counter[tuple[str, str]] = Counter()
    for node in nodes:
        if node.gpus:
            gpus[(node.model or "GPU", hardware_of(node).name)] += node.gpus
    parts = [f"{count} x {model} (hardware={name})" for (model, name), count in gpus.items()]
    return ", ".join([*parts, f"{sum(node.cpus for node in nodes)} CPU cores (hardware=cpu)"])
