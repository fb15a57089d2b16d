"""Ray: what a cluster has, connecting to one or starting one."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from sweeper.hardware import Node, Target
from sweeper.said import SaidWrongly
from workloads import host

# ── what there is ───────────────────────────────────────────────────────────────────────────────────────────


def look(address: str | None) -> list[Node]:
    """The nodes of the cluster at `address`, which it connects to, or without one of this machine.

    Nothing is started. Raises SaidWrongly where no cluster answers.
    """
    ray.shutdown()  # what an earlier sweep of this process may have left connected
    address = address or os.environ.get("RAY_ADDRESS")
    if address in (None, "local"):
        return [_this_machine()]
    try:
        if found := re.fullmatch(r"(?:ray://)?([^:/]+):(\d+)", address):
            # Ray itself tries for minutes, aloud.
            socket.create_connection((found[1], int(found[2])), timeout=5).close()
        _init(address=address)
    except (OSError, ValueError, RuntimeError) as error:
        why = "start one with `ray start --head`" if address == "auto" else brief(error)
        raise SaidWrongly(f"cluster.address={address}: no Ray cluster answers there ({why})") from error
    return [_node(entry) for entry in ray.nodes() if entry["Alive"]]


def _this_machine() -> Node:
    # What Ray itself would find here when it starts, so that what is promised now is there then.
    from ray._private.accelerators import get_accelerator_manager_for_resource

    manager = get_accelerator_manager_for_resource("GPU")
    visible = manager.get_current_process_visible_accelerator_ids()
    found = manager.get_current_node_num_accelerators()
    gpus = min(found, len(visible)) if visible is not None else found
    names = host.gpu_names()
    if visible is not None and all(entry.isdigit() and int(entry) < len(names) for entry in visible):
        names = tuple(names[int(entry)] for entry in visible)
    return Node(
        address="this machine",
        cpus=len(os.sched_getaffinity(0)),
        cpu_name=host.cpu_name(),
        gpus=gpus,
        accelerator=manager.get_current_node_accelerator_type() if gpus else None,
        gpu_names=names if gpus else (),
        cpu_architecture=host.cpu_architecture(),
    )


def _node(entry: dict[str, Any], patience_s: float = 60) -> Node:
    resources = entry["Resources"]
    label = next((key.split(":", 1)[1] for key in resources if key.startswith("accelerator_type:")), None)
    there = NodeAffinitySchedulingStrategy(node_id=entry["NodeID"], soft=False)
    names = ray.remote(_names).options(num_cpus=0, scheduling_strategy=there)
    try:
        cpu_name, cpu_architecture, gpu_names = ray.get(names.remote(), timeout=patience_s)
    except (RayError, GetTimeoutError) as error:
        raise SaidWrongly(f"cluster: node {entry['NodeManagerAddress']} does not run tasks ({brief(error)})") from error
    gpus = int(resources.get("GPU", 0))
    return Node(
        address=entry["NodeManagerAddress"],
        cpus=int(resources.get("CPU", 0)),
        cpu_name=cpu_name,
        gpus=gpus,
        accelerator=label,
        gpu_names=gpu_names if gpus else (),
        id=entry["NodeID"],
        cpu_architecture=cpu_architecture,
    )


def joined(known: set[str]) -> list[Node]:
    """The nodes of the connected cluster that are up and not among those; what does not answer is left for later."""
    found = []
    for entry in ray.nodes():
        if entry["Alive"] and entry["NodeID"] not in known:
            with contextlib.suppress(SaidWrongly):
                found.append(_node(entry, patience_s=10))
    return found


def _names() -> tuple[str, str, tuple[str, ...]]:
    return host.cpu_name(), host.cpu_architecture(), host.gpu_names()


# ── starting and stopping ───────────────────────────────────────────────────────────────────────────────────


def start(target: Target) -> None:
    """Start a local cluster, unless `look` has connected to one. It ends with this process, even a killed one."""
    if not ray.is_initialized():
        # "local" also where an address file of another cluster lies about.
        _init(address="local", num_cpus=target.nodes[0].cpus, object_store_memory=128 * 2**20)


def _init(**options: Any) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # the coming default; without it Ray warns
    umask = os.umask(0o077)  # Ray writes its access token with the umask
    try:
        ray.init(
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            namespace="sweeper",
            **options,
        )
    finally:
        os.umask(umask)


def stop() -> None:
    """Leave the cluster, and end it if it is ours."""
    ray.shutdown()


def brief(error: BaseException) -> str:
    """What happened, out of the many lines in which Ray says it."""
    text = str(error)
    if "connection error code 2" in text:
        return "its process ended unexpectedly: killed, or crashed"
    if found := re.search(r"exit detail: (.*?)(?: Some common causes|\n|$)", text):
        return found[1].rstrip(". ")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    telling = [line for line in lines if "because" in line or "terminated" in line]
    return (telling or lines or [type(error).__name__])[0][:200]
