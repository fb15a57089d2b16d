"""Run a matrix product on every device at once and an all-reduce over them, as trials of a Ray gang."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from rich.console import Console

from sweeper.commands.doctor.checks import Finding, check_relative_rates, check_trial
from sweeper.common.format import format_number
from sweeper.common.trials import Trial, TrialResult, TrialStatus
from sweeper.config.hardware import Node, Target
from sweeper.execution import cluster, gang_pool
from sweeper.execution.gang_launcher import GangResources, GangSpec
from sweeper.metrics.derivation import tflops_of
from workloads.api import host

# On a CPU few readings, and none with a cold cache: its cores take a second to flush the cache before each one.
PARAMETERS: dict[str, dict[str, dict[str, Any]]] = {
    "gpu": {"matmul": {"m": 8192, "n": 8192, "k": 8192, "dtype": "bf16", "repeats": 50}, "allreduce": {"mib": 256}},
    "cpu": {
        "matmul": {"m": 512, "n": 512, "k": 512, "dtype": "fp32", "statistic": "median_warm", "repeats": 5},
        "allreduce": {"mib": 4, "repeats": 5},
    },
}
MAX_CPU_RANKS = 2
TRIAL_TIMEOUT_S = 300
DEADLINE_S = 360  # for the start of the workers and the trial


def exercise(target: Target, console: Console) -> Iterator[Finding]:
    """Run the matrix product and, with several ranks, the all-reduce; print their rates and yield the findings."""
    ranks = target.devices if target.hardware.kind == "gpu" else min(MAX_CPU_RANKS, target.devices)
    with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere):  # what Ray prints about its workers
        cluster.start(target, has_variables=False)
    matmul = _run_trial(target, "matmul", ranks)
    yield from check_trial("the matrix product", matmul)
    if matmul.status is TrialStatus.COMPLETE:
        rates = [tflops_of(m.flops_per_step, m.step_times_s, m.statistic) for m in matmul.measurements]
        mean, slowest = format_number(statistics.mean(rates)), format_number(min(rates))
        console.print(f"matmul     {len(rates)} at once: mean {mean} TFLOP/s, slowest {slowest} TFLOP/s")
        vendor = next((gpu.vendor for node in target.nodes for gpu in node.gpu_identities), "")
        yield from check_relative_rates(matmul.measurements, rates, vendor)
    if ranks < 2:
        return
    allreduce = _run_trial(target, "allreduce", ranks)
    yield from check_trial(f"the all-reduce over {ranks} ranks", allreduce)
    if allreduce.status is TrialStatus.COMPLETE:
        rate = format_number(allreduce.measurements[0].metrics["bus_gb_s"])
        console.print(f"all-reduce {ranks} ranks: {rate} GB/s per device in each direction")


def _run_trial(target: Target, workload: str, ranks: int) -> TrialResult:
    """Run one trial over all ranks. A trial that cannot start has the status failed or timed out."""
    parameters = PARAMETERS[target.hardware.kind][workload]
    spec = GangSpec(workload, parameters, settings=None, resources=GangResources(ranks), timeout_s=TRIAL_TIMEOUT_S)
    pool = gang_pool.GangPool(target, spec, count=1)
    try:
        submitted = False
        deadline_s = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline_s:
            if not submitted and pool.capacity() > 0:
                pool.submit(Trial(0, {}))
                submitted = True
            for _, result in pool.wait(0.25):
                return result
        return TrialResult(TrialStatus.TIMED_OUT, 0.0, 0.0, f"no worker started within {DEADLINE_S // 60} minutes")
    except cluster.ClusterError as error:
        return TrialResult(TrialStatus.FAILED, 0.0, 0.0, str(error))
    finally:
        pool.close()


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
