"""Describe this machine, or a cluster node from its Ray entry and the report of a task on the node."""

import os
from collections.abc import Collection, Iterable
from typing import Any

from sweeper.config.hardware import Node
from sweeper.execution import ray_internals
from workloads.api import gpu_setup, host
from workloads.api.gpus import GpuIdentity

GPU_DOMAIN = "ray.io/gpu-domain"  # Ray's label for an NVLink domain across nodes


def describe_local_node(variables: Collection[str] = ()) -> Node:
    """Describe this machine. Ray's own code counts the GPUs, so the plan matches what a local cluster will get."""
    visible, gpus = ray_internals.visible_gpu_ids(), ray_internals.count_gpus()
    gpus = min(gpus, len(visible)) if visible is not None else gpus
    identities = host.gpu_identities()
    used_gib = tuple(enumerate(host.gpus_used_gib()))
    if visible is not None and all(gpu.isdigit() and int(gpu) < len(identities) for gpu in visible):
        identities = tuple(identities[int(gpu)] for gpu in visible)
        used_gib = tuple(used_gib[int(gpu)] for gpu in visible)
    elif visible is not None:
        used_gib = ()  # the driver's GPU numbers are unknown if GPUs are listed by UUID
    return Node(
        address="this machine",
        cpus=len(os.sched_getaffinity(0)),
        cpu_name=host.cpu_name(),
        gpus=gpus,
        accelerator=ray_internals.gpu_type() if gpus else None,
        gpu_identities=_responding(identities) if gpus else (),
        gpus_used_gib=used_gib if gpus else (),
        gpu_problems=tuple(gpu_setup.find_problems(gpus, os.environ)),
        cpu_architecture=host.cpu_architecture(),
        environment=_read_variables(variables),
    )


def describe_hardware(gpus: int, variables: Collection[str]) -> dict[str, Any]:
    """Return the fields of `Node` that a node reports about itself. `gpus` is Ray's GPU count for the node. GPU
    visibility variables are not checked, because Ray sets them to hide all GPUs from this task."""
    return {
        "cpu_name": host.cpu_name(),
        "cpu_architecture": host.cpu_architecture(),
        "gpu_identities": _responding(host.gpu_identities()) if gpus else (),
        "gpu_problems": tuple(gpu_setup.find_problems(gpus, {})),
        "environment": _read_variables(variables),
    }


def _read_variables(names: Collection[str]) -> tuple[tuple[str, str], ...]:
    return tuple((name, os.environ[name]) for name in sorted(names) if name in os.environ)


def count_gpus(entry: dict[str, Any]) -> int:
    return int(entry["Resources"].get("GPU", 0))


def _responding(identities: Iterable[GpuIdentity]) -> tuple[GpuIdentity, ...]:
    return tuple(identity for identity in identities if identity.responds)


def build_node(entry: dict[str, Any], description: dict[str, Any] | None, code_problem: str = "") -> Node:
    """Build a node from its entry in `ray.nodes()` and the result of `describe_hardware` on that node. A node with a
    `code_problem` has no description and does not take part in the sweep."""
    resources = entry["Resources"]
    if description is None:
        return Node(entry["NodeManagerAddress"], 0, "", id=entry["NodeID"], code_problem=code_problem)
    return Node(
        address=entry["NodeManagerAddress"],
        cpus=int(resources.get("CPU", 0)),
        gpus=count_gpus(entry),
        accelerator=next((key.split(":", 1)[1] for key in resources if key.startswith("accelerator_type:")), None),
        id=entry["NodeID"],
        memory_gib=resources.get("memory", 0.0) / 2**30,
        gpu_domain=entry["Labels"].get(GPU_DOMAIN),
        **description,
    )
