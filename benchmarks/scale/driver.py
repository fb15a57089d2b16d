"""The driver over a simulated cluster: its work for a trial as trials and nodes grow, and opening its sweep again.

`Sweep` with its loop, its study on disk, its board and its pool of gangs are the real ones. The recording process is
left out: it is a process of its own, and measured by itself.
"""

from __future__ import annotations

import json
import os
import sys
import time
from array import array
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.scale.stage import GPUS_OF_A_NODE, Stage

WINDOW = 1000  # trials over which a figure is taken
MARKS = (1_000, 3_000, 10_000, 30_000, 100_000)


class Parts:
    """How long each call of each part of the driver took, what it called of other parts left out."""

    def __init__(self, stage: Stage) -> None:
        self.calls: defaultdict[str, array[float]] = defaultdict(lambda: array("d"))
        self._inner_s, self._stage = [0.0], stage

    def time(self, owner: Any, name: str, said: str) -> None:
        call = getattr(owner, name)

        def timed(*words: Any, **find_hardware: Any) -> Any:
            begun_s, stage_s = time.process_time(), self._stage.own_s
            self._inner_s.append(0.0)
            try:
                return call(*words, **find_hardware)
            finally:
                took_s = time.process_time() - begun_s - (self._stage.own_s - stage_s)
                self.calls[said].append(took_s - self._inner_s.pop())
                self._inner_s[-1] += took_s

        setattr(owner, name, timed)

    def ms(self, said: str, until: int) -> float:
        """Of a call, the mean over a window that ends with this one."""
        taken = self.calls[said][max(0, until - WINDOW) : until]
        return 1e3 * sum(taken) / max(1, len(taken))

    def sum_s(self, *said: str) -> float:
        return sum(sum(self.calls[name]) for name in said)


class Enough(Exception):
    """The last mark is reached."""


class NoBooks:
    """In the recorder's place."""

    trouble, opened, behind = "", None, 0

    def __init__(self, *_: Any) -> None:
        pass

    def __getattr__(self, _: str) -> Callable[..., bool]:
        return lambda *_: True


def planned(folder: Path, nodes: int, gpus: int, *words: str) -> Any:
    """A plan for the main job on so many nodes, as the command makes it."""
    from hydra import compose, initialize_config_dir

    from sweeper.cli import overrides
    from sweeper.config import resolution
    from sweeper.config.hardware import Node
    from sweeper.execution import cluster
    from sweeper.planning import plan

    names = ("NVIDIA H200",) * GPUS_OF_A_NODE
    there = [Node(f"n{n}", 192, "a CPU", GPUS_OF_A_NODE, "H200", names, f"{n:056x}", "sm90") for n in range(nodes)]
    cluster.look = lambda *_: there
    cluster.start = cluster.stop = lambda *_: None
    cluster.NodeDiscovery.look = lambda *_: ([], {node.id for node in there})  # none joins, none is lost
    with initialize_config_dir(str(resolution.CONF), version_base="1.3"):
        said = ["hardware=h200", f"gpus={gpus}", "space.m=range(64,65536,64)", "space.n=range(64,65536,64)"]
        said += ["space.k=range(64,65536,64)", "finals.top=0", "progress=never", f"dir={folder}", *words]
        return plan.plan(resolution.read(compose("config", overrides=overrides.quote_spaces(said))))


TIMED = {
    "Study.ask": "ask",
    "Study.tell": "tell",
    "GangPool.submit": "hand out",
    "GangPool.wait": "collect",
}
TIMED |= {"GangPool.__init__": "start", "metrics.derive": "figures", "Sweep._state": "state"}


def drive(nodes: int, gpus: int, trials: int, measured: bytes, folder: Path) -> dict[str, Any]:
    """A sweep of so many trials, with the driver's work on its way there."""
    from sweeper import sweep
    from sweeper.execution import gang, gang_pool
    from sweeper.search.study import Study

    stage = Stage(measured)
    parts = Parts(stage)
    gang.ray = gang.time = gang_pool.ray = gang_pool.time = stage
    gang_pool.placement_group = gang_pool.remove_placement_group = lambda *_, **__: None
    gang_pool.PlacementGroupSchedulingStrategy = lambda *_: None
    sweep.TrackingClient = NoBooks
    owners = {"Study": Study, "GangPool": gang_pool.GangPool, "Sweep": sweep.Sweep, "metrics": sweep.metrics}
    for name, said in TIMED.items():
        owner, _, call = name.partition(".")
        parts.time(owners[owner], call, said)
    remembered: dict[Any, dict[str, float]] = {}
    derive = sweep.metrics.derive

    def once(measurements: Any, *words: Any) -> dict[str, float]:
        key = measurements[0].step_times_s
        if key not in remembered:
            remembered[key] = derive(measurements, *words)
        return dict(remembered[key])

    sweep.metrics = SimpleNamespace(derive=once)
    before_mib = memory_mib()
    # It is left at the last mark, with all workers busy: where a sweep ends, trials end one by one.
    words = ["search=random", f"budget.trials={2 * trials + 4 * nodes * GPUS_OF_A_NODE}", "trial.timeout_s=300"]
    made = sweep.Sweep(planned(folder, nodes, gpus, *words), ["sweeper"])
    journal, update = made._plan.folder / "study.journal", made._progress.update
    marks = [mark for mark in MARKS if mark <= trials]
    at: dict[int, SimpleNamespace] = {}
    rows: list[dict[str, Any]] = []

    def updated(state: Any, record: Any = None, better: bool = False) -> None:
        update(state, record, better)
        ended = made._board.ended
        if record is None or ended not in windows:
            return
        own_s = time.process_time()
        at[ended] = SimpleNamespace(
            collected_s=parts.sum_s("collect"),
            other_s=own_s - begun_s - stage.own_s - parts.sum_s(*parts.calls),
            clock_s=stage.monotonic(),
            waited_s=stage.waited_s,
            memory_mib=memory_mib() - before_mib,
            journal_bytes=journal.stat().st_size / ended,
        )
        if ended in marks:
            rows.append(row_of(ended, at[ended - WINDOW], at[ended], parts))
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
        stage.own_s += time.process_time() - own_s
        if ended == marks[-1]:
            raise Enough

    windows = {0, *marks, *(mark - WINDOW for mark in marks)}
    made._progress.update = updated
    made._board.start()
    begun_s = time.process_time()
    at[0] = SimpleNamespace(collected_s=0.0, other_s=0.0, clock_s=0.0, waited_s=0.0)
    with suppress(Enough):
        made._run_trials(made._plan.gangs, made._has_trials, made._study.ask)
    made._lock.close()
    return {
        "nodes": nodes,
        "gpus": gpus,
        "gangs": made._plan.gangs,
        "all_busy_s": stage.all_busy_s,
        "rows": rows,
    }


def row_of(mark: int, before: SimpleNamespace, now: SimpleNamespace, parts: Parts) -> dict[str, Any]:
    """The driver's work for a trial, in ms, over the window before this mark, and how far it has come."""
    took = {name: parts.ms(name, mark) for name in ("ask", "tell", "hand out", "state")}
    took["figures"] = parts.ms("figures", len(parts.calls["figures"]))
    took["collect"] = 1e3 * (now.collected_s - before.collected_s) / WINDOW
    took["other"] = 1e3 * (now.other_s - before.other_s) / WINDOW
    passed_s = now.clock_s - before.clock_s
    return {
        "trials": mark,
        "ms": took,
        "per_s": WINDOW / passed_s,
        "idle": (now.waited_s - before.waited_s) / passed_s,
        "memory_mib": now.memory_mib,
        "journal_bytes": now.journal_bytes,
    }


def resume(nodes: int, gpus: int, trials: int, folder: Path) -> dict[str, float]:
    """Opening the sweep that has ended, as the next start does."""
    from sweeper import sweep

    sweep.TrackingClient = NoBooks
    before_mib, plan = memory_mib(), planned(folder, nodes, gpus, "search=random")
    begun_s = time.process_time()
    made = sweep.Sweep(plan, ["sweeper"])
    took_s = time.process_time() - begun_s
    assert made._board.ended == trials and made._study.unfinished
    return {"s": took_s, "memory_mib": memory_mib() - before_mib}


def memory_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
