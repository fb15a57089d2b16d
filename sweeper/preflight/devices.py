"""Select a sweep's devices from the cluster's nodes. A sweep never falls back to a CPU if GPUs cannot be used."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from sweeper.common.format import name_some
from sweeper.common.grouping import group_values
from sweeper.config.catalogue import UNDIVIDED, catalogue, check_partition, devices_per_gpu, divide, partition_of
from sweeper.config.hardware import ASSUMED_GPUS_PER_NODE, PLANNED_ADDRESS, Node, Target, hardware_of, has_hardware
from sweeper.config.resolution import ResolvedConfig, check_world_size
from sweeper.config.schema import Hardware
from workloads.api.errors import UserInputError

SHOWN_NODES = 3  # the number of nodes to list for the same problem


def select_devices(resolved: ResolvedConfig, nodes: Sequence[Node]) -> tuple[Target, int]:
    """Return a sweep's target and the ranks per trial. Raises UserInputError if no such devices exist."""
    config = resolved.config
    ranks = config.gpus if isinstance(config.gpus, int) else 1
    is_absent = config.hardware.name in catalogue() and not any(has_hardware(node, config.hardware) for node in nodes)
    if config.plan and is_absent:
        target = planned_target(config.hardware, ranks)
    else:
        target = select_usable_target(resolved, nodes, ranks)
    if config.gpus == "all":
        if not target.is_gpu:
            raise UserInputError(f"gpus=all: there are no GPUs ({target.model}); set the number of processes")
        ranks = target.devices
    check_world_size(resolved.workload, config, ranks)
    return target, ranks


def planned_target(hardware: Hardware, gpus: int) -> Target:
    """Return the GPUs that one trial needs, in nodes of eight. The GPUs come from the catalog and need not exist."""
    check_partition(hardware)
    if hardware.partition == UNDIVIDED:
        hardware = replace(hardware, partition=None)
    gpus_per_node = ASSUMED_GPUS_PER_NODE * devices_per_gpu(hardware)
    nodes, per_node = -(-gpus // gpus_per_node), min(gpus, gpus_per_node)
    node = Node(PLANNED_ADDRESS, cpus=0, cpu_name="", gpus=per_node, accelerator=hardware.name)
    model = " ".join(filter(None, (hardware.name, hardware.partition)))
    return Target(divide(hardware), model, (node,) * nodes)


def select_usable_target(resolved: ResolvedConfig, nodes: Sequence[Node], ranks: int) -> Target:
    """Return the target for trials of this many ranks, on nodes with usable GPUs.

    If the hardware is named, unusable GPUs are accepted for a plan and for a command, which may use its own torch.

    Raises UserInputError in the same cases as `select_target`, and if no node has usable GPUs.
    """
    config, problems = resolved.config, describe_problems(nodes)
    if config.hardware.name == "auto" and problems and not any(node.gpus for node in nodes):
        raise _unusable("auto", problems)
    try:
        target = select_target(config.hardware, nodes, ranks)
        if config.hardware.name != "auto" and (config.plan or resolved.settings is not None):
            return target
        usable = [node for node in target.nodes if not (target.is_gpu and node.gpu_problems)]
        if 0 < len(usable) < len(target.nodes):
            return select_target(config.hardware, usable, ranks)
    except UserInputError as error:  # no or too few devices: append the problems
        raise UserInputError("\n".join([str(error), *problems])) from error
    if not usable:
        raise _unusable(config.hardware.name, describe_problems(target.nodes))
    return target


def _unusable(hardware: str, problems: list[str]) -> UserInputError:
    first, *others = problems
    return UserInputError("\n".join([f"hardware={hardware}: {first}", *others, "hardware=cpu sweeps the CPU"]))


def describe_problems(nodes: Sequence[Node]) -> list[str]:
    """Return a line for each problem with the nodes' GPUs, with the affected nodes and the remedy."""
    places = group_values((problem, node.label) for node in nodes for problem in node.gpu_problems)
    return [f"{name_some(labels, SHOWN_NODES)}: {problem}" for problem, labels in places.items()]


def select_target(hardware: Hardware, nodes: Sequence[Node], gpus: int) -> Target:
    """Return the nodes with this hardware as a target. Raises UserInputError if the nodes are missing or ambiguous."""
    if hardware.kind == "cpu" or (hardware.name == "auto" and not any(node.gpus for node in nodes)):
        # A study must not mix CPU models, so take the most frequent model.
        cpu_name = Counter(node.cpu_name for node in nodes).most_common(1)[0][0]
        selected = [node for node in nodes if node.cpu_name == cpu_name]
        target = Target(Hardware(name="cpu", kind="cpu"), selected[0].cpu_model, tuple(selected))
    else:
        hardware, selected = _select_kind(hardware, nodes)
        # Device properties come from the catalog and from the driver's report on the smallest device.
        identities = [gpu for node in selected for gpu in node.gpu_identities]
        units = min((gpu.compute_units for gpu in identities if gpu.compute_units), default=None)
        memory_gib = min((gpu.memory_gib for gpu in identities if gpu.memory_gib), default=None)
        partition = partition_of(identities[0]) if identities else None
        device = divide(replace(hardware, partition=partition), units, memory_gib)
        target = Target(device, selected[0].model or hardware.name, tuple(selected))
    if gpus > target.devices:
        hint = "" if target.is_gpu else ", one for each process"
        raise UserInputError(f"gpus={gpus}: the cluster has {target.devices} {target.unit} ({target.model}){hint}")
    return target


def _select_kind(hardware: Hardware, nodes: Sequence[Node]) -> tuple[Hardware, list[Node]]:
    selected = [node for node in nodes if node.gpus]
    if hardware.name == "auto":
        kinds = {entry.name: entry for entry in map(hardware_of, selected)}
        if len(kinds) > 1:
            choose = f"choose hardware={'|'.join(kinds)}"
            raise UserInputError(f"hardware=auto: the cluster has {describe_inventory(nodes)}; {choose}")
        hardware = replace(next(iter(kinds.values())), partition=hardware.partition)
    else:
        selected = [node for node in selected if has_hardware(node, hardware)]
        if not selected:
            advice = "cluster.address=HOST:PORT joins a cluster that has it, and a sweep with plan=true needs no device"
            inventory = describe_inventory(nodes)
            raise UserInputError(f"hardware={hardware.name}: not in the cluster, which has {inventory}; {advice}")
    check_partition(hardware)
    modes = sorted(set[str]().union(*(node.partitions for node in selected)))
    if hardware.partition is None and len(modes) > 1:
        differ = f"its GPUs are in different partition modes, {' and '.join(modes)}, which do not compare"
        raise UserInputError(f"hardware={hardware.name}: {differ}; set hardware.partition={'|'.join(modes)}")
    selected = [node for node in selected if node.partitions == {hardware.partition or modes[0]}]
    if not selected:
        reason = f"no node has all of its GPUs in it; the cluster has {', '.join(modes)}"
        raise UserInputError(f"hardware.partition={hardware.partition}: {reason}")
    return hardware, selected


def describe_inventory(nodes: Sequence[Node]) -> str:
    """Describe a cluster's devices: `8 x NVIDIA H200 (hardware=h200), 64 CPU cores (hardware=cpu)`."""
    gpus: Counter[tuple[str, str]] = Counter()
    for node in nodes:
        if node.gpus:
            gpus[(node.model or "GPU", hardware_of(node).name)] += node.gpus
    parts = [f"{count} x {model} (hardware={name})" for (model, name), count in gpus.items()]
    return ", ".join([*parts, f"{sum(node.cpus for node in nodes)} CPU cores (hardware=cpu)"])
