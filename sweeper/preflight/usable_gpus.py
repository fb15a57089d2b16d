"""The devices of a sweep, checked for GPUs that are there and cannot be used: no sweep takes a CPU in their place."""

from __future__ import annotations

from collections.abc import Sequence

from sweeper.config.hardware import Node, Target, select_target
from sweeper.config.resolution import ResolvedConfig
from workloads.api.errors import UserInputError
from workloads.api.gpu_setup import GpuProblem

SHOWN_NODES = 3  # that have the same problem


def select_usable_target(resolved: ResolvedConfig, nodes: Sequence[Node], ranks: int) -> Target:
    """Return the target of a sweep whose trials have so many ranks: no node that cannot use its GPUs is part of it.

    Raises:
        UserInputError: as `select_target`, or if no node can use its GPUs. For a named GPU that is no error of a plan,
            nor of a command, which may have a torch of its own.
    """
    config, problems = resolved.config, describe_problems(nodes)
    if config.hardware.name == "auto" and problems and not any(node.gpus for node in nodes):
        raise _unusable("auto", problems)
    target = _select(resolved, nodes, ranks, problems)
    if config.hardware.name != "auto" and (config.plan or resolved.settings is not None):
        return target
    usable = [node for node in target.nodes if not (target.is_gpu and node.gpu_problems)]
    if not usable:
        raise _unusable(config.hardware.name, describe_problems(target.nodes))
    return target if len(usable) == len(target.nodes) else _select(resolved, usable, ranks, problems)


def _select(resolved: ResolvedConfig, nodes: Sequence[Node], ranks: int, problems: list[str]) -> Target:
    """Return the target. An error that no device is there, or too few, has the problems as further lines."""
    try:
        return select_target(resolved.config.hardware, nodes, ranks)
    except UserInputError as error:
        raise UserInputError("\n".join([str(error), *problems])) from error


def describe_problems(nodes: Sequence[Node]) -> list[str]:
    """Return a line for each problem of the nodes' GPUs, with the nodes that have it and the remedy."""
    places: dict[GpuProblem, list[str]] = {}
    for node in nodes:
        for problem in node.gpu_problems:
            places.setdefault(problem, []).append(node.label)
    return [f"{_join(labels)}: {problem}" for problem, labels in places.items()]


def _join(labels: list[str]) -> str:
    more = f" and {len(labels) - SHOWN_NODES} more" if len(labels) > SHOWN_NODES else ""
    return ", ".join(labels[:SHOWN_NODES]) + more


def _unusable(hardware: str, problems: list[str]) -> UserInputError:
    first, *others = problems
    return UserInputError("\n".join([f"hardware={hardware}: {first}", *others, "hardware=cpu sweeps the CPU"]))
