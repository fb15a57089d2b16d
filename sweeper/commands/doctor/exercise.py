"""Run a matrix product on every device at once and an all-reduce over them, as trials of a Ray gang."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from sweeper.common.trials import Trial, TrialResult, TrialStatus
from sweeper.config.hardware import Node, Target
from sweeper.execution import cluster, gang_pool
from sweeper.execution.gang_launcher import GangResources, GangSpec
from sweeper.metrics import derivation
from workloads.api import host

GPU_PRODUCT = {"m": 8192, "n": 8192, "k": 8192, "dtype": "bf16", "repeats": 50}
CPU_PRODUCT = {"m": 512, "n": 512, "k": 512, "dtype": "fp32", "repeats": 20}
GPU_ALLREDUCE = {"mib": 256}
CPU_ALLREDUCE = {"mib": 4}
MAX_CPU_RANKS = 2
TRIAL_TIMEOUT_S = 300
DEADLINE_S = 360  # for the start of the workers and the trial


def count_ranks(target: Target) -> int:
    """Return how many ranks a trial has: one for each GPU, on CPUs at most `MAX_CPU_RANKS`."""
    return target.devices if target.hardware.kind == "gpu" else min(MAX_CPU_RANKS, target.devices)


def start_cluster(target: Target) -> None:
    """Start Ray, or connect to it, without what Ray prints about its workers."""
    with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere):
        cluster.start(target)


def run_matmul(target: Target) -> TrialResult:
    """Run the same matrix product on every device at once."""
    return _run_trial(target, "matmul", GPU_PRODUCT if target.hardware.kind == "gpu" else CPU_PRODUCT)


def run_allreduce(target: Target) -> TrialResult:
    """Run an all-reduce over all devices. It needs at least two ranks."""
    return _run_trial(target, "allreduce", GPU_ALLREDUCE if target.hardware.kind == "gpu" else CPU_ALLREDUCE)


def compute_tflops(result: TrialResult) -> list[float]:
    """Return the rate of each rank of a complete matmul trial, in TFLOP/s."""
    return [derivation.tflops_of(m.flops_per_step, m.step_times_s, m.statistic) for m in result.measurements]


def _run_trial(target: Target, workload: str, parameters: Mapping[str, Any]) -> TrialResult:
    """Run one trial over all ranks. A trial that cannot start has the status failed or timed out."""
    resources = GangResources(count_ranks(target))
    spec = GangSpec(workload, dict(parameters), settings=None, resources=resources, timeout_s=TRIAL_TIMEOUT_S)
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
    state: dict[str, Any] = ray.get(
        ray.remote(read_node_state).options(num_cpus=0, scheduling_strategy=on_node).remote(folder)
    )
    return state
