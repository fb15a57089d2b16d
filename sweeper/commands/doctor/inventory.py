"""Read the state of every node."""

from __future__ import annotations

from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from sweeper.config.hardware import Node
from workloads.api import host


def read_node_state(node: Node, folder: str) -> dict[str, Any]:
    """Return the state of a node: read by a task there, or in this process for a node without a Ray id.

    Args:
        folder: where a sweep writes; its free disk space is part of the state.
    """
    if node.id is None:
        return host.read_node_state(folder)
    on_node = NodeAffinitySchedulingStrategy(node_id=node.id, soft=False)
    state: dict[str, Any] = ray.get(
        ray.remote(read_node_state).options(num_cpus=0, scheduling_strategy=on_node).remote(folder)
    )
    return state
