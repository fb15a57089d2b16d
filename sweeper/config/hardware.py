"""Which devices a sweep is for: the catalogue over `conf/hardware/`, held against what the cluster has."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from omegaconf import OmegaConf

from sweeper.common.errors import UserInputError, build
from sweeper.config.resolution import CONF, Hardware

GPUS_OF_A_NODE = 8  # where nobody has looked
USED_BY_OTHERS_GIB = 1.0  # less is a display's, or of a program that only has the GPU open


@dataclass(frozen=True)
class Node:
    """A machine as the scheduler sees it. `accelerator` is Ray's word for its GPUs, `gpu_names` the driver's."""

    address: str
    cpus: int
    cpu_name: str
    gpus: int = 0
    accelerator: str | None = None
    gpu_names: tuple[str, ...] = ()
    gpus_used_gib: tuple[tuple[int, float], ...] = ()  # by the driver's numbers; of this machine alone, before a sweep
    id: str | None = None  # Ray's, of a node of a cluster that is up
    cpu_architecture: str = "cpu"
    memory_gib: float | None = None  # that the scheduler gives out; None: of a cluster that is not up yet

    def room(self, gib: float) -> int:
        """How many processes it holds that take a GPU, and so much of its memory, each."""
        return self.gpus if not gib or self.memory_gib is None else min(self.gpus, int(self.memory_gib / gib))

    @property
    def model(self) -> str | None:
        """What its GPUs are called: by the driver where it says, else by Ray."""
        return self.gpu_names[0] if self.gpu_names else self.accelerator

    @property
    def said(self) -> str:
        """Several may share an address: on one machine, or one after the other."""
        return f"{self.address} ({self.id[:8]})" if self.id else self.address


@dataclass(frozen=True)
class Target:
    """What a sweep runs on: one model of one kind of hardware, and the nodes that have it."""

    hardware: Hardware
    model: str
    nodes: tuple[Node, ...]

    @property
    def devices(self) -> int:
        """How many GPUs, or on a CPU how many cores, there are of it."""
        return sum(node.gpus if self.hardware.kind == "gpu" else node.cpus for node in self.nodes)

    def least_memory_gib(self) -> float:
        """Of any of its nodes; nothing where that is not known."""
        return min((node.memory_gib or 0.0 for node in self.nodes), default=0.0)

    def gangs(self, size: int, wanted: int | None, *, whole_nodes: bool = False, gib: float = 0.0) -> int:
        """How many gangs of `size` run at once: as wanted, else one for each `size` GPUs, on a CPU one.

        `whole_nodes`: no two on one node; `gib`: of its node's memory, that each process takes. On a CPU neighbours
        disturb each other's timings. Raises SaidWrongly for more than there is room for.
        """
        most = (sum(node.room(gib) for node in self.nodes) if self.hardware.kind == "gpu" else self.devices) // size
        if whole_nodes and self.hardware.kind == "gpu" and self.nodes:
            most = len(self.nodes) // -(-size // min(node.gpus for node in self.nodes))
        if wanted is not None and wanted > most:
            alone = " with exclusive=node" if whole_nodes else f" with {gib:g} GiB of memory each" if gib else ""
            raise UserInputError(f"cluster.workers={wanted}: at most {most} fit on {self.devices} {self.unit}{alone}")
        return wanted or (most if self.hardware.kind == "gpu" else 1)

    def in_use(self) -> list[str]:
        """Which of the GPUs that are measured others have part of, in words; of a cluster's the doctor tells."""
        return [
            f"{gib:.1f} GiB of GPU {number}: what else runs there is measured too (nvidia-smi shows it)"
            for node in self.nodes
            for number, gib in node.gpus_used_gib
            if gib > USED_BY_OTHERS_GIB and self.hardware.kind == "gpu"
        ]

    def with_more(self, nodes: Iterable[Node]) -> Target:
        """With those of these nodes that have the same devices."""
        alike = [node for node in nodes if self._is_alike(node)]
        return replace(self, nodes=(*self.nodes, *alike))

    def without(self, ids: Collection[str]) -> Target:
        """Without the nodes that have these ids of Ray's."""
        return replace(self, nodes=tuple(node for node in self.nodes if node.id not in ids))

    def _is_alike(self, node: Node) -> bool:
        if self.hardware.kind == "gpu":
            return is_a(self.hardware, node) and node.model == self.model
        return _said_cpu(node) == self.model

    def cores_of_whole_nodes(self, size: int) -> int:
        """So many for each rank of a gang that none is left on its nodes, which are taken to be alike."""
        return max(1, min(node.cpus // min(size, max(1, node.gpus)) for node in self.nodes))

    def cores_for_each(self, ranks: int) -> int:
        """The most cores that each of `ranks` processes can have, none of which spans two nodes."""
        cores = max(node.cpus for node in self.nodes)
        while cores > 1 and sum(node.cpus // cores for node in self.nodes) < ranks:
            cores -= 1
        return cores

    @property
    def architecture(self) -> str | None:
        """As `workloads/recipes.py` knows it; None for a GPU that the catalogue does not have."""
        return self.nodes[0].cpu_architecture if self.hardware.kind == "cpu" else self.hardware.architecture

    @property
    def unit(self) -> str:
        return "GPUs" if self.hardware.kind == "gpu" else "CPU cores"


@cache
def catalogue() -> dict[str, Hardware]:
    """Every kind of GPU in `conf/hardware/`, by its name."""
    entries = {}
    for path in sorted((CONF / "hardware").glob("*.yaml")):
        plain = OmegaConf.to_container(OmegaConf.load(path))
        assert isinstance(plain, dict)
        entry = build(Hardware, {str(key): value for key, value in plain.items()}, f"{path.name}: ")
        if entry.kind == "gpu" and entry.name != "auto":
            entries[entry.name] = entry
    return entries


def is_a(hardware: Hardware, node: Node) -> bool:
    """Whether the node's GPUs are of this kind: by the driver's names where known, else by Ray's label."""
    if not node.gpus:
        return False
    if node.gpu_names:
        return all(any(re.search(p, name) for p in hardware.device_names) for name in node.gpu_names)
    return node.accelerator in hardware.accelerators


def kind_of(node: Node) -> Hardware:
    """The catalogue's entry for a node's GPUs, or one without peaks for a GPU that it does not know."""
    for entry in catalogue().values():
        if is_a(entry, node):
            return entry
    name = re.sub(r"[^a-z0-9]+", "_", (node.model or "gpu").lower()).strip("_")
    return Hardware(name=name, accelerators=[node.accelerator] if node.accelerator else [])


def choose(wanted: Hardware, nodes: Sequence[Node], gpus: int) -> Target:
    """The nodes that a sweep for the wanted hardware runs on.

    Raises SaidWrongly where the cluster has none of it, has several kinds for `auto`, or has fewer than `gpus`.
    """
    if wanted.kind == "cpu" or (wanted.name == "auto" and not any(node.gpus for node in nodes)):
        target = _cpu(nodes)
    else:
        target = _gpus(wanted, nodes)
    if gpus > target.devices:
        each = "" if target.hardware.kind == "gpu" else ", one for each process"
        raise UserInputError(f"gpus={gpus}: the cluster has {target.devices} {target.unit} ({target.model}){each}")
    return target


def on_paper(wanted: Hardware, gpus: int) -> Target:
    """As many GPUs of the catalogue as a trial is for, in nodes of eight: to plan for what is not here."""
    count = -(-gpus // GPUS_OF_A_NODE)
    node = Node("on paper", cpus=0, cpu_name="", gpus=min(gpus, GPUS_OF_A_NODE), accelerator=wanted.name)
    return Target(wanted, wanted.name, (node,) * count)


def _cpu(nodes: Sequence[Node]) -> Target:
    # Processors that differ do not belong into one study: take the model there is most of.
    model = Counter(node.cpu_name for node in nodes).most_common(1)[0][0]
    chosen = tuple(node for node in nodes if node.cpu_name == model)
    return Target(Hardware(name="cpu", kind="cpu"), _said_cpu(chosen[0]), chosen)


def _said_cpu(node: Node) -> str:
    return f"{node.cpu_name} ({node.cpus} cores)"


def _gpus(wanted: Hardware, nodes: Sequence[Node]) -> Target:
    with_gpus = [node for node in nodes if node.gpus]
    if wanted.name == "auto":
        kinds = {kind_of(node).name: kind_of(node) for node in with_gpus}
        if len(kinds) > 1:
            raise UserInputError(
                f"hardware=auto: the cluster has {said_inventory(nodes)}; say which, hardware={'|'.join(kinds)}"
            )
        wanted = next(iter(kinds.values()))
        chosen = with_gpus
    else:
        chosen = [node for node in with_gpus if is_a(wanted, node)]
        if not chosen:
            raise UserInputError(f"hardware={wanted.name}: there is none; the cluster has {said_inventory(nodes)}")
    return Target(wanted, chosen[0].model or wanted.name, tuple(chosen))


def said_inventory(nodes: Iterable[Node]) -> str:
    """What a cluster has, in words: `8 x NVIDIA H200 (hardware=h200), 64 CPU cores (hardware=cpu)`."""
    nodes = list(nodes)
    gpus: Counter[tuple[str, str]] = Counter()
    for node in nodes:
        if node.gpus:
            gpus[(node.model or "GPU", kind_of(node).name)] += node.gpus
    words = [f"{count} x {model} (hardware={name})" for (model, name), count in gpus.items()]
    return ", ".join([*words, f"{sum(node.cpus for node in nodes)} CPU cores (hardware=cpu)"])


def named(model: str) -> Hardware | None:
    """The catalogue's entry for what a driver or Ray calls a GPU; None where it has none."""
    for entry in catalogue().values():
        if model in entry.accelerators or any(re.search(pattern, model) for pattern in entry.device_names):
            return entry
    return None
