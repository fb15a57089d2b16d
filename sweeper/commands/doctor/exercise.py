"""Run GEMMs on all devices at once and an all-reduce on each node, and judge the results like an acceptance run."""

import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from rich.console import Console

from sweeper.commands.accept.causes import add_causes
from sweeper.commands.accept.experiments import Reading, read_experiments
from sweeper.commands.accept.judge import Verdict, judge
from sweeper.commands.accept.measure import plan_phases, read_result, run_phases, summarize
from sweeper.commands.doctor.checks import Finding, add_changes, has_new_use
from sweeper.common.trials import TrialStatus
from sweeper.config.hardware import Node, Target
from sweeper.execution import cluster
from workloads.api import host

EXERCISED = ("matmul", "collectives")  # workloads to run, each with the first experiment for one device or node
ALONE = ("device", "node")
UPDATE_TIMEOUT_S = 10.0  # time for all nodes to respond and for the memory of exited workers to be freed


def exercise(target: Target, states: Mapping[str, Mapping[str, Any]], console: Console) -> Iterator[Finding]:
    """Print the measured rates. Yield a finding for each slow or failed test. `states` maps node names to states."""
    with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere):  # hides Ray's messages about workers
        cluster.start(target, has_variables=False)
    first = {e.workload: e for e in reversed(read_experiments(target.hardware.kind, "quick")) if e.scope in ALONE}
    readings = list[Reading]()
    phases = plan_phases(target, list(states), [first[name] for name in EXERCISED])
    for job, experiment, result in run_phases(phases, math.inf):
        new = list(read_result(job, experiment, result))
        readings += new
        for line in summarize(job.place, new):
            console.print(line)
    for judgement in add_causes(judge(readings, target.hardware.kind, {}, {}), states):
        reading = judgement.reading
        is_disturbed = reading.problem.startswith(TrialStatus.INCONCLUSIVE.value)  # other processes, not a fault
        remedy = "find other processes with top, and measure again" if is_disturbed else "see Ray's logs"
        if reading.problem or judgement.verdict is Verdict.FAIL:
            problem = f"{reading.test}: {judgement.reason}"
            yield Finding(reading.part, problem, judgement.cause or remedy, affects_results=not is_disturbed)


class NodeWatches:
    """Readers of node states: an actor on each node, or this process for a node without a Ray ID.

    Attributes:
        states: node states by node name: the host name, or the address and Ray ID if several nodes share a host.
    """

    def __init__(self, nodes: Sequence[Node], folder: str) -> None:
        """Read the initial states. Each state includes the free disk space of `folder`, to which sweeps write."""
        self._folder, self._local = folder, host.NodeWatch()
        on_node = [NodeAffinitySchedulingStrategy(node_id=node.id, soft=False) if node.id else None for node in nodes]
        watch = ray.remote(host.NodeWatch)
        self._actors = [place and watch.options(num_cpus=0, scheduling_strategy=place).remote() for place in on_node]
        states = self._read()
        hosts = [str(state["node"]) for state in states]
        names = hosts if len(set(hosts)) == len(hosts) else [node.label for node in nodes]
        self.states = dict(zip(names, states, strict=True))

    def update(self) -> None:
        """Bring the states up to date. A node that is lost or does not respond keeps its last state."""
        deadline_s = time.monotonic() + UPDATE_TIMEOUT_S
        before = after = [*self.states.values()]
        while True:
            after = [new or last for last, new in zip(after, self._read(deadline_s), strict=True)]
            self.states = {name: add_changes(*pair) for name, *pair in zip(self.states, before, after, strict=True)}
            if not any(map(has_new_use, before, after)) or time.monotonic() > deadline_s:
                return
            time.sleep(0.5)  # the driver takes a moment to free the memory of exited workers

    def _read(self, deadline_s: float | None = None) -> list[dict[str, Any]]:
        """Return the state of each node. If there is a deadline, the state of a lost or late node is empty."""
        replies = [actor and actor.read_state.remote(self._folder) for actor in self._actors]
        states = list[dict[str, Any]]()
        for reply in replies:
            left_s = None if deadline_s is None else max(0.1, deadline_s - time.monotonic())
            try:
                states.append(ray.get(reply, timeout=left_s) if reply else self._local.read_state(self._folder))
            except RayError:
                if deadline_s is None:
                    raise
                states.append({})
        return states
