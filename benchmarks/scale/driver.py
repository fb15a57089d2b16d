"""The driver over a simulated cluster: its work for a trial as trials and nodes grow, and resuming its sweep.

`Sweep` with its loop, its study on disk, its progress and its pool of gangs are the real ones. The recording process is
excluded: it is a separate process, and `components.py` measures it.
"""

import json
import os
import sys
import time
from array import array
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.scale.simulated_ray import GPUS_PER_NODE, SimulatedRay

WINDOW = 1000  # trials over which a value is averaged
MARKS = (1_000, 3_000, 10_000, 30_000, 100_000)


class CallTimer:
    """Times the calls of functions, without the time of other timed functions that they call.

    Attributes:
        calls: CPU seconds of each call, by label.
        own_s: CPU seconds that timing took: reading the CPU time takes up to 60 us in a virtual machine.
    """

    def __init__(self, simulation: SimulatedRay) -> None:
        self.calls: defaultdict[str, array[float]] = defaultdict(lambda: array("d"))
        self.own_s = 0.0
        self._inner_s = [0.0]
        self._simulation = simulation
        readings_s = [time.process_time() for _ in range(1000)]
        self._reading_s = (readings_s[-1] - readings_s[0]) / (len(readings_s) - 1)

    def patch(self, owner: Any, function: str, label: str) -> None:
        """Replace a function of a class or module by one that records its CPU time under this label."""
        call = getattr(owner, function)

        def timed(*args: Any, **kwargs: Any) -> Any:
            started_s, simulation_started_s = time.process_time(), self._simulation.own_s
            self._inner_s.append(0.0)
            try:
                return call(*args, **kwargs)
            finally:
                total_s = time.process_time() - started_s - (self._simulation.own_s - simulation_started_s)
                self.calls[label].append(total_s - self._reading_s - self._inner_s.pop())
                self._inner_s[-1] += total_s + self._reading_s
                self.own_s += 2 * self._reading_s

        setattr(owner, function, timed)

    def mean_ms(self, label: str, until: int) -> float:
        """Return the mean time of a call over the window that ends with call `until`."""
        times_s = self.calls[label][max(0, until - WINDOW) : until]
        return 1e3 * sum(times_s) / max(1, len(times_s))

    def sum_s(self, *labels: str) -> float:
        return sum(sum(self.calls[label]) for label in labels)


class LastMarkReached(Exception):
    """Ends the sweep at the last mark."""


class NoTracking:
    """Replaces the tracking client."""

    last_error = ""
    is_open = False
    pending = 0
    experiment_id = None

    def __init__(self, *_: Any) -> None:
        pass

    def __getattr__(self, _: str) -> Callable[..., bool]:
        return lambda *_: True


def build_plan(folder: Path, nodes: int, gpus: int, *arguments: str) -> Any:
    """Build a plan of the matmul workload on so many simulated nodes, as the command does."""
    from hydra import compose, initialize_config_dir

    from sweeper.cli.composition import quote_spaces
    from sweeper.config import resolution
    from sweeper.config.hardware import Node
    from sweeper.execution import cluster
    from sweeper.preflight import sweep_plan
    from workloads.api.gpus import GpuIdentity

    gpus_of_node = tuple(GpuIdentity(number, "nvidia", "NVIDIA H200") for number in range(GPUS_PER_NODE))
    node = Node("", 192, "a CPU", GPUS_PER_NODE, "H200", gpus_of_node, cpu_architecture="sm90")
    simulated = [replace(node, address=f"n{n}", id=f"{n:056x}") for n in range(nodes)]
    cluster.start = cluster.stop = lambda *_: None
    cluster.NodeDiscovery.poll = lambda *_: ([], {node.id for node in simulated})  # none joins, none is lost
    sweep = ["hardware=h200", f"gpus={gpus}", "space.m=range(64,65536,64)", "space.n=range(64,65536,64)"]
    sweep += ["space.k=range(64,65536,64)", "finals.top=0", "progress=never", f"dir={folder}", *arguments]
    with initialize_config_dir(str(resolution.CONF), version_base="1.3"):
        resolved = resolution.resolve(compose("config", overrides=quote_spaces(sweep)))
        return sweep_plan.plan_sweep(resolved, simulated)


TIMED_FUNCTIONS = {
    "Study.ask": "ask",
    "Study.tell": "tell",
    "GangPool.__init__": "start",
    "GangPool.submit": "submit",
    "GangPool.wait": "wait",
    "metrics.derive": "metrics",
    "Sweep._state": "state",
}


@dataclass(frozen=True)
class Snapshot:
    """The state of a simulated sweep after a number of trials."""

    # rounds, syncs: of the loop, and of the journal to the disk
    rounds: int = 0
    syncs: int = 0
    # wait_s, other_s: CPU seconds in `GangPool.wait`, and outside of all timed functions
    wait_s: float = 0.0
    other_s: float = 0.0
    # clock_s, waited_s: the simulated clock, and how much of it the driver waited
    clock_s: float = 0.0
    waited_s: float = 0.0
    memory_mib: float = 0.0  # by which the process has grown
    journal_bytes: float = 0.0  # of a trial


def drive(
    nodes: int, gpus: int, trials: int, pickled_measurement: bytes, folder: Path, sampler: str = "random"
) -> dict[str, Any]:
    """Run a sweep of so many trials. Returns the driver's work at each of MARKS."""
    from sweeper.commands.sweep import loop
    from sweeper.execution import gang_pool, judge
    from sweeper.search.study import Study

    simulation = SimulatedRay(pickled_measurement)
    timer = CallTimer(simulation)
    replace_ray(simulation)
    owners = {"Study": Study, "GangPool": gang_pool.GangPool, "Sweep": loop.Sweep, "metrics": judge.derivation}
    for name, label in TIMED_FUNCTIONS.items():
        owner, _, function = name.partition(".")
        timer.patch(owners[owner], function, label)
    timer.patch(os, "fsync", "disk")
    remember_metrics()
    initial_mib = memory_mib()
    # The sweep is ended at the last mark with all workers busy, because at its own end trials end one by one.
    budget = 2 * trials + 4 * nodes * GPUS_PER_NODE
    plan = build_plan(folder, nodes, gpus, f"search={sampler}", f"budget.trials={budget}", "trial.timeout_s=300")
    running = loop.Sweep(plan, ["sweeper"])
    journal = running._plan.folder / "study.journal"
    update = running._display.update
    marks = [mark for mark in MARKS if mark <= trials]
    snapshot_points = {0, *marks, *(mark - WINDOW for mark in marks)}
    snapshots: dict[int, Snapshot] = {0: Snapshot()}
    rows: list[dict[str, Any]] = []

    def update_and_take_snapshot(state: Any, record: Any = None, is_best: bool = False) -> None:
        update(state, record, is_best)
        ended = running._progress.finished_trials
        if record is None or ended not in snapshot_points:
            return
        snapshot_started_s = time.process_time()
        snapshots[ended] = Snapshot(
            rounds=len(timer.calls["wait"]),
            syncs=len(timer.calls["disk"]),
            wait_s=timer.sum_s("wait"),
            other_s=snapshot_started_s - started_s - simulation.own_s - timer.own_s - timer.sum_s(*timer.calls),
            clock_s=simulation.read_clock(),
            waited_s=simulation.waited_s,
            memory_mib=memory_mib() - initial_mib,
            journal_bytes=journal.stat().st_size / ended,
        )
        if ended in marks:
            rows.append(build_row(ended, snapshots[ended - WINDOW], snapshots[ended], timer))
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
        simulation.own_s += time.process_time() - snapshot_started_s
        if ended == marks[-1]:
            raise LastMarkReached

    running._display.update = update_and_take_snapshot
    running._progress.start()
    started_s = time.process_time()
    with suppress(LastMarkReached):
        running._run_trials(running._plan.resources.gangs, running._has_trials, running._study.ask)
    running._opened.lock.close()
    return {
        "nodes": nodes,
        "gpus": gpus,
        "gangs": running._plan.resources.gangs,
        "all_busy_s": simulation.all_busy_s,
        "rows": rows,
    }


def replace_ray(simulation: SimulatedRay) -> None:
    """Let the driver's modules use the simulation in place of Ray and the clock, and write nothing to MLflow."""
    from sweeper.commands.sweep import opening
    from sweeper.execution import gang, gang_launcher, gang_pool

    gang.ray = gang.time = gang_pool.ray = gang_pool.time = gang_launcher.ray = simulation
    gang_launcher.placement_group = gang_launcher.remove_placement_group = lambda *_, **__: None
    gang_launcher.PlacementGroupSchedulingStrategy = lambda *_: None
    opening.TrackingClient = NoTracking


def remember_metrics() -> None:
    """Let the judge compute, and a timer time, the metrics of each distinct measurement once."""
    from sweeper.execution import judge

    derive, remembered = judge.derivation.derive, dict[Any, dict[str, float]]()

    def derive_once(measurements: Any, *args: Any) -> dict[str, float]:
        key = measurements[0].step_times_s
        if key not in remembered:
            remembered[key] = derive(measurements, *args)
        return dict(remembered[key])

    judge.derivation = SimpleNamespace(derive=derive_once, describe_impossible=judge.derivation.describe_impossible)


def build_row(mark: int, before: Snapshot, now: Snapshot, timer: CallTimer) -> dict[str, Any]:
    """Return the driver's work for a trial, in ms, over the window before this mark, and the state at the mark."""
    work_ms = {label: timer.mean_ms(label, mark) for label in ("ask", "tell", "submit", "state")}
    work_ms["metrics"] = timer.mean_ms("metrics", len(timer.calls["metrics"]))
    work_ms["wait"] = 1e3 * (now.wait_s - before.wait_s) / WINDOW
    work_ms["other"] = 1e3 * (now.other_s - before.other_s) / WINDOW
    passed_s = now.clock_s - before.clock_s
    return {
        "trials": mark,
        "ms": work_ms,
        "per_s": WINDOW / passed_s,
        "round_ms": 1e3 * (passed_s - now.waited_s + before.waited_s) / max(1, now.rounds - before.rounds),
        "syncs_a_round": (now.syncs - before.syncs) / max(1, now.rounds - before.rounds),
        "idle": (now.waited_s - before.waited_s) / passed_s,
        "memory_mib": now.memory_mib,
        "journal_bytes": now.journal_bytes,
    }


def resume(nodes: int, gpus: int, trials: int, folder: Path, sampler: str) -> dict[str, float]:
    """Return the CPU seconds and the memory of opening the sweep that `drive` left, as its next start does."""
    from sweeper.commands.sweep import loop, opening

    opening.TrackingClient = NoTracking
    initial_mib = memory_mib()
    plan = build_plan(folder, nodes, gpus, f"search={sampler}")
    started_s = time.process_time()
    resumed = loop.Sweep(plan, ["sweeper"])
    cpu_s = time.process_time() - started_s
    assert resumed._progress.finished_trials == trials and resumed._study.unfinished
    return {"s": cpu_s, "memory_mib": memory_mib() - initial_mib}


def memory_mib() -> float:
    """Return the resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
