"""For a sweep on the local CPU, choose cores that no other process uses, according to the counters in /proc."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from workloads.api.errors import UserInputError

if TYPE_CHECKING:
    from sweeper.config.hardware import Node
    from sweeper.preflight.sweep_plan import SweepPlan

WINDOW_S = 0.5
WINDOWS = 4  # number of windows; an intermittent load is low in at least one window
HELD = 0.5  # in cores; a lower load leaves enough undisturbed calls
THREADS = "OMP_NUM_THREADS"  # a user who sets this variable has chosen the cores
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
KERNEL_THREAD = 0x00200000  # PF_KTHREAD in include/linux/sched.h


class CoreWatch:
    """A watch on core usage that starts when the object is created. The process can do other work in the meantime."""

    def __init__(self) -> None:
        self._first = _read()

    def find_use(self) -> tuple[float, str]:
        """Return how many cores other processes always use, and the busiest process. Return 0 early if idle."""
        least, (last_at_s, last_s, first) = float("inf"), self._first
        for _ in range(WINDOWS):
            time.sleep(max(0.0, last_at_s + WINDOW_S - time.monotonic()))
            at_s, others_s, processes = _read()
            least = min(least, (others_s - last_s) / (at_s - last_at_s))
            if least < HELD:
                return 0.0, ""
            last_at_s, last_s = at_s, others_s
        # The list is empty if other processes are hidden, for example in a container.
        return least, max(processes, key=lambda name: processes[name] - first.get(name, 0.0), default="")


def _read(proc: Path = Path("/proc")) -> tuple[float, float, dict[str, float]]:
    """Return the time, other processes' CPU seconds on this process's cores, and the CPU seconds of each process."""
    allowed, ticks, processes = {f"cpu{number}" for number in os.sched_getaffinity(0)}, 0, {}
    with suppress(OSError):
        for name, *counts in map(str.split, (proc / "stat").read_text().splitlines()):
            if name in allowed:
                user, nice, system, _, _, interrupts, soft_interrupts, *_ = map(int, counts)
                ticks += user + nice + system + interrupts + soft_interrupts
    for file in proc.glob("[0-9]*/stat"):
        with suppress(OSError):  # the process has ended
            start, _, fields = file.read_text().rpartition(")")
            if (pid := file.parent.name) != str(os.getpid()) and int(fields.split()[6]) & KERNEL_THREAD == 0:
                processes[f"{start.partition('(')[2]} (pid {pid})"] = sum(map(int, fields.split()[11:13])) / TICKS_PER_S
    return time.monotonic(), ticks / TICKS_PER_S - sum(os.times()[:4]), processes


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
    held = f"other processes use {use:.1f} of {node.cpus} cores{process and f', most of it {process}'}"
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
