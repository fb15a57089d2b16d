"""Run products on every device at once and an all-reduce on each node, with the verdicts of an acceptance."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from rich.console import Console

from sweeper.commands.accept.causes import add_causes
from sweeper.commands.accept.experiments import Reading, read_experiments
from sweeper.commands.accept.judge import Verdict, judge
from sweeper.commands.accept.measure import plan_phases, read_result, run_phases, summarize
from sweeper.commands.doctor.checks import Finding
from sweeper.common.trials import TrialStatus
from sweeper.config.hardware import Node, Target
from sweeper.execution import cluster
from workloads.api import host

EXERCISED = ("matmul", "collectives")  # the first experiment of each on a node alone
ALONE = ("device", "node")


def exercise(target: Target, states: Mapping[str, Mapping[str, Any]], console: Console) -> Iterator[Finding]:
    """Print the rates of products and, of several ranks, of an all-reduce; yield what is too slow or did not run.

    Args:
        states: of the target's nodes, by name.
    """
    with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere):  # what Ray prints about its workers
        cluster.start(target, has_variables=False)
    first = {e.workload: e for e in reversed(read_experiments(target.hardware.kind, "quick")) if e.scope in ALONE}
    readings = list[Reading]()
    for job, experiment, result in run_phases(
        plan_phases(target, list(states), [first[name] for name in EXERCISED]), math.inf
    ):
        new = list(read_result(job, experiment, result))
        readings += new
        for line in summarize(job.place, new):
            console.print(line)
    for judgement in add_causes(judge(readings, target.hardware.kind, {}, {}), states):
        reading = judgement.reading
        is_disturbed = reading.problem.startswith(TrialStatus.INCONCLUSIVE.value)  # by other processes: no fault
        remedy = "find other processes with top, and measure again" if is_disturbed else "see Ray's logs"
        if reading.problem or judgement.verdict is Verdict.FAIL:
            problem = f"{reading.test}: {judgement.reason}"
            yield Finding(reading.part, problem, judgement.cause or remedy, affects_results=not is_disturbed)


def read_states(nodes: Sequence[Node], folder: str) -> dict[str, dict[str, Any]]:
    """Return the states by the nodes' names: their hosts, or addresses with Ray's ids where several share a host."""
    states = [read_node_state(node, folder) for node in nodes]
    hosts = [str(state["node"]) for state in states]
    names = hosts if len(set(hosts)) == len(hosts) else [node.label for node in nodes]
    return dict(zip(names, states, strict=True))


def read_node_state(node: Node, folder: str) -> dict[str, Any]:
    """Return the state of a node: read by a task there, or in this process for a node without a Ray id.

    Args:
        folder: where a sweep writes; its free disk space is part of the state.
    """
    if node.id is None:
        return host.read_node_state(folder)
    on_node = NodeAffinitySchedulingStrategy(node_id=node.id, soft=False)
    task = ray.remote(host.read_node_state).options(num_cpus=0, scheduling_strategy=on_node)
    state: dict[str, Any] = ray.get(task.remote(folder))
    return state
