"""For a sweep on the local CPU, choose cores that no other process uses, according to `CoreWatch`."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from sweeper.common.format import describe_use
from workloads.api.cores import CoreWatch
from workloads.api.errors import UserInputError

if TYPE_CHECKING:
    from sweeper.config.hardware import Node
    from sweeper.preflight.sweep_plan import SweepPlan

THREADS = "OMP_NUM_THREADS"  # a user who sets this variable has chosen the cores


def plan_on_free_cores(
    make_plan: Callable[[Sequence[Node]], SweepPlan], nodes: Sequence[Node], cpus: int | None, watch: CoreWatch
) -> SweepPlan:
    """Return a sweep's plan on `cpus` cores of this machine, or on the cores that other processes do not use.

    A sweep that has begun keeps its number of cores. Raises UserInputError like `plan_sweep`, or for invalid `cpus`.
    """
    if cpus is not None:
        if nodes[0].id or cpus > nodes[0].cpus:
            of_cluster = "applies to this machine alone; `ray start --num-cpus` sets the cores of a node"
            reason = of_cluster if nodes[0].id else f"this machine has {nodes[0].cpus} cores"
            raise UserInputError(f"cluster.cpus={cpus}: {reason}")
        plan = make_plan([nodes[0].using(cpus)])
        if plan.target.is_gpu:
            raise UserInputError(f"cluster.cpus={cpus}: this sweep runs on GPUs; hardware=cpu sweeps the CPU")
        return plan
    plan = make_plan(nodes)
    node, resources = plan.target.nodes[0], plan.resources
    # Our own workloads use one thread per core, unless the variable sets another number.
    has_threads = any(
        name.rpartition(".")[2] == THREADS for name in (*os.environ, *plan.space.constants, *plan.space.dimensions)
    )
    is_ours = resources.gpus == resources.gangs == 1 and plan.resolved.settings is None and not has_threads
    if not is_ours or plan.target.is_gpu or node.id:
        return plan
    for begun in map(node.using, range(node.cpus, 0, -1)):
        if _has_begun(plan, begun.cpu_model):
            note = f"trials use {begun.cpus} of {node.cpus} cores, as when this sweep began"
            note += f" (cluster.cpus={node.cpus}: all)"
            return replace(make_plan([begun]), busy=note) if begun.idle_cpus else plan
    use, process = (0.0, "") if plan.config.plan else watch.find_use()
    if not use:
        return plan
    held = describe_use(use, process, node.cpus)
    if (free := node.cpus - max(1, round(use))) < 1:
        return replace(plan, busy=f"{held}: end them first, or trials may stay inconclusive")
    return replace(make_plan([node.using(free)]), busy=f"{held}: trials use {free} (cluster.cpus={node.cpus}: all)")


def _has_begun(plan: SweepPlan, device: str) -> bool:
    """Return whether the sweep has begun on these cores. Ignore cores that other commands chose with `cluster.cpus`."""
    from sweeper.preflight.sweep_plan import name_folder
    from sweeper.results.description import read_description

    folder = name_folder(plan.config, plan.space, plan.target, {**plan.identity, "device": device})
    with suppress(UserInputError):  # the sweep rewrites a damaged description
        description = read_description(folder)
        if description.device == device:
            return bool(plan.config.name or description.config["cluster"].get("cpus") is None)
    return False
