"""What the driver costs as sweeps and clusters grow: up to 100,000 trials on 1,000 simulated nodes of 8 GPUs.

    python benchmarks/scale.py [--trials 100000] [--recorded 10000] [--result benchmarks/results/scale.md]

The driver is the real one: `Sweep` with its loop, its study on disk, its board and its pool of gangs. In the place of
Ray stands `Stage`, whose workers answer after a trial's time, by a clock that runs with the process's CPU time while
the driver works and jumps to the next answer while it waits. What they answer is a real measurement of a product,
taken first. The recording process is left out of the driver's runs: it is a process of its own, and measured by itself,
as are Ray's waiting for many answers, the samplers and a resume. Each part runs in a process of its own, so that its
memory is its own.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import os
import pickle
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
NODES, GPUS_OF_A_NODE = 1000, 8
TRIAL_S = (50.0, 70.0)  # a trial takes so long, evenly spread
WINDOW = 1000  # trials over which a figure is taken
MARKS = (1_000, 3_000, 10_000, 30_000, 100_000)
SAMPLERS = {"random": 100_000, "qmc": 100_000, "cmaes": 100_000, "tpe": 100_000, "gp": 100}  # up to
ASKS = 5
DIFFERENT = 256  # so many different measurements there are: the figures of each are computed, and timed, once


# ── in Ray's place ──────────────────────────────────────────────────────────────────────────────────────────


class Ref:
    """A reply that comes at a time of the clock."""

    __slots__ = ("at_s", "there", "value")

    def __init__(self, at_s: float, value: Callable[[], Any]) -> None:
        self.at_s, self.value, self.there = at_s, value, False

    def __lt__(self, other: Ref) -> bool:
        return self.at_s < other.at_s


class Stage:
    """`ray` and `time` as `sweeper.gangs` uses them. `own_s`: what it took itself, of the process's time."""

    def __init__(self, measured: bytes) -> None:
        self._measured = pickle.loads(measured)
        self._pending: list[Ref] = []
        self._news = 0  # replies that came and nobody has fetched
        self._jumped_s = self.own_s = self.waited_s = 0.0
        self._workers = 0
        self.all_busy_s = 0.0  # when the last of the workers got its first trial
        self._begun_s = time.process_time()

    def monotonic(self) -> float:
        return time.process_time() - self._begun_s - self.own_s + self._jumped_s

    time = monotonic

    def sleep(self, seconds: float) -> None:
        self._jumped_s += seconds

    def remote(self, _: type) -> Any:
        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=self._worker))

    def _worker(self) -> Any:
        number, self._workers = self._workers, self._workers + 1
        node, gpu = divmod(number, GPUS_OF_A_NODE)
        here = {"address": f"10.0.{node // 250}.{node % 250}", "port": 4242, "node": f"n{node}", "pid": number}
        here |= {"log": "", "gpus": str(gpu), "node_id": f"{node:056x}"}
        free_at_s = [0.0]

        def run(job: Any) -> Ref:
            """One after the other, as an actor does; the ranks of a gang take the same time."""
            took_s = random.Random(job.rank.turn).uniform(*TRIAL_S)
            now_s = self.monotonic()
            if not free_at_s[0]:
                self.all_busy_s = now_s
            free_at_s[0] = max(free_at_s[0], now_s) + took_s
            return self._due(free_at_s[0], lambda: self._reply(job))

        hello = SimpleNamespace(remote=lambda: self._due(0.0, lambda: here))
        return SimpleNamespace(hello=hello, run=SimpleNamespace(remote=run))

    def _reply(self, job: Any) -> Any:
        """As fast as the point is, on every node."""
        from sweeper.worker import Reply

        factor = 1 + random.Random(str(job.parameters)).randrange(DIFFERENT) / DIFFERENT
        times_s = tuple(factor * time_s for time_s in self._measured.step_times_s)
        measured = replace(self._measured, executed=dict(job.parameters), step_times_s=times_s)
        return Reply(job.rank.rank, 1e9, 1e9 + 60, measured)

    def _due(self, at_s: float, value: Callable[[], Any]) -> Ref:
        ref = Ref(at_s, value)
        heapq.heappush(self._pending, ref)
        return ref

    def get(self, refs: Any, timeout: float | None = None) -> Any:
        if isinstance(refs, list):
            return [ref.value() for ref in refs]
        self._news -= 1
        return refs.value()

    def wait(self, refs: list[Ref], num_returns: int, timeout: float) -> tuple[list[Ref], list[Ref]]:
        begun_s = time.process_time()
        now_s = self.monotonic()
        if self._pending and not self._news and timeout > 0 and self._pending[0].at_s > now_s:
            step_s = min(timeout, self._pending[0].at_s - now_s)
            self._jumped_s += step_s
            self.waited_s += step_s
            now_s += step_s
        while self._pending and self._pending[0].at_s <= now_s:
            heapq.heappop(self._pending).there = True
            self._news += 1
        found = [ref for ref in refs if ref.there] if timeout == 0 else []
        self.own_s += time.process_time() - begun_s
        return found, []

    def kill(self, *_: Any, **__: Any) -> None:
        pass


# ── the driver ──────────────────────────────────────────────────────────────────────────────────────────────


class Parts:
    """How long each call of each part of the driver took, what it called of other parts left out."""

    def __init__(self, stage: Stage) -> None:
        self.calls: defaultdict[str, array[float]] = defaultdict(lambda: array("d"))
        self._inner_s, self._stage = [0.0], stage

    def time(self, owner: Any, name: str, said: str) -> None:
        call = getattr(owner, name)

        def timed(*words: Any, **named: Any) -> Any:
            begun_s, stage_s = time.process_time(), self._stage.own_s
            self._inner_s.append(0.0)
            try:
                return call(*words, **named)
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

    from sweeper import cluster, config, plan
    from sweeper.hardware import Node

    names = ("NVIDIA H200",) * GPUS_OF_A_NODE
    there = [Node(f"n{n}", 192, "a CPU", GPUS_OF_A_NODE, "H200", names, f"{n:056x}", "sm90") for n in range(nodes)]
    cluster.look = lambda *_: there
    cluster.start = cluster.stop = lambda *_: None
    cluster.Scout.look = lambda *_: ([], {node.id for node in there})  # none joins, none is lost
    with initialize_config_dir(str(config.CONF), version_base="1.3"):
        said = ["hardware=h200", f"gpus={gpus}", "space.m=range(64,65536,64)", "space.n=range(64,65536,64)"]
        said += ["space.k=range(64,65536,64)", "finals.top=0", "progress=never", f"dir={folder}", *words]
        return plan.plan(config.read(compose("config", overrides=config.quote_spaces(said))))


TIMED = {
    "Study.ask": "ask",
    "Study.tell": "tell",
    "Pool.submit": "hand out",
    "Pool.wait": "collect",
}
TIMED |= {"Pool.__init__": "start", "metrics.derive": "figures", "Sweep._state": "state"}


def drive(nodes: int, gpus: int, trials: int, measured: bytes, folder: Path) -> dict[str, Any]:
    """A sweep of so many trials, with the driver's work on its way there, and what its resume would take."""
    from sweeper import gang, gangs, sweep
    from sweeper.search import Study

    stage = Stage(measured)
    parts = Parts(stage)
    gang.ray = gang.time = gangs.ray = gangs.time = stage
    gangs.placement_group = gangs.remove_placement_group = lambda *_, **__: None
    gangs.PlacementGroupSchedulingStrategy = lambda *_: None
    sweep.Recorder = NoBooks
    owners = {"Study": Study, "Pool": gangs.Pool, "Sweep": sweep.Sweep, "metrics": sweep.metrics}
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
        "resume": ask_resume(folder, nodes, gpus, trials),
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


def samplers(most: int) -> list[dict[str, Any]]:
    """What the next proposal takes by each sampler among so many trials, in ms of CPU, the median of a few."""
    from optuna.trial import TrialState, create_trial

    from sweeper.search import Study
    from sweeper.space import Range, Space

    space = Space({name: Range(64, 65472, 64) for name in "mnk"}, {})
    chance, rows = random.Random(0), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as folder:
        journal = Path(folder, "study.journal")
        made = Study(journal, {}, space, sampler="random", seed=0, objective="x", direction="maximize")
        told = 0
        for mark in [mark for mark in (100, *MARKS) if mark <= most]:
            for _ in range(told, mark):
                params = {name: 64 * chance.randrange(1, 1024) for name in "mnk"}
                made._memory.add_trial(
                    create_trial(params=params, distributions=made.distributions, value=chance.random())
                )
            told, row = mark, {"trials": mark}
            for name, until in SAMPLERS.items():
                took_ms = []
                for _ in range(ASKS if mark <= until else 0):
                    made._sampler, begun_s = name, time.process_time()
                    asked = made._propose(mark)
                    took_ms.append(1e3 * (time.process_time() - begun_s))
                    made._memory.tell(asked, state=TrialState.FAIL)
                if took_ms:
                    row[name] = statistics.median(took_ms)
            rows.append(row)
    return rows


def ask_resume(folder: Path, nodes: int, gpus: int, trials: int) -> dict[str, float]:
    return part("resume", "--folder", str(folder), "--nodes", str(nodes), "--gpus", str(gpus), "--trials", str(trials))


def resume(nodes: int, gpus: int, trials: int, folder: Path) -> dict[str, float]:
    """Opening the sweep that has ended, as the next start does."""
    from sweeper import sweep

    sweep.Recorder = NoBooks
    before_mib, plan = memory_mib(), planned(folder, nodes, gpus, "search=random")
    begun_s = time.process_time()
    made = sweep.Sweep(plan, ["sweeper"])
    took_s = time.process_time() - begun_s
    assert made._board.ended == trials and made._study.unfinished
    return {"s": took_s, "memory_mib": memory_mib() - before_mib}


# ── beside the driver ───────────────────────────────────────────────────────────────────────────────────────


def record(trials: int, measured: bytes, folder: Path) -> list[dict[str, float]]:
    """Write as many trials to MLflow in SQLite, as the recording process does; its work along the way."""
    from dataclasses import asdict

    from sweeper import metrics
    from sweeper.outcome import Ending, Record
    from sweeper.record import Store

    os.chdir(folder)
    one = pickle.loads(measured)
    figures = metrics.derive((one,), {"fp32": 60.0}, {}, 4.8)
    where = {"node": "n1", "pid": 4242, "gpus": "0", "log": "/tmp/ray/session_latest/logs/worker.err"}
    parent = {"params": {"sweep.gpus": 1}, "tags": {"workload": "matmul"}, "artifacts": {"config.yaml": "a: 1"}}
    store, chance, rows = Store("sqlite:///mlflow.db", "matmul", "study", "scale", parent), random.Random(0), []
    begun_s = cpu_s = 0.0
    for number in range(trials):
        params = {name: 64 * chance.randrange(1, 1024) for name in "mnk"}
        measurements = [asdict(one) | {"executed": dict(one.executed) | params}]
        where["pid"] = number
        store.write(
            Record(number, params, Ending.COMPLETE, "", "", figures, measurements, where, 1e9, 1e9 + 60, float(number))
        )
        if number in {mark - WINDOW for mark in MARKS}:
            begun_s, cpu_s = time.perf_counter(), time.process_time()
        if number + 1 in MARKS:
            wall_ms = 1e3 * (time.perf_counter() - begun_s) / WINDOW
            ms = 1e3 * (time.process_time() - cpu_s) / WINDOW
            looked_s = time.process_time()
            store.look_again()
            row = {"trials": number + 1, "ms": ms, "wall_ms": wall_ms, "look_s": time.process_time() - looked_s}
            row |= {"bytes": Path("mlflow.db").stat().st_size / (number + 1), "memory_mib": memory_mib()}
            rows.append(row)
            print(json.dumps(row), file=sys.stderr, flush=True)
    return rows


def waiting() -> list[dict[str, float]]:
    """Ray's own time for asking which of many replies are there: none is."""
    import ray

    from sweeper.cluster import _init

    class Hanging:
        async def hang(self) -> None:
            import asyncio

            await asyncio.sleep(3600)

    _init(address="local", num_cpus=1, object_store_memory=128 * 2**20)
    actor = ray.remote(Hanging).options(max_concurrency=20_000, num_cpus=0).remote()
    refs, rows = [], []
    for count in (8, 80, 800, 8000):
        refs += [actor.hang.remote() for _ in range(count - len(refs))]
        ray.wait(refs, num_returns=len(refs), timeout=1)
        took_ms = []
        for _ in range(20):
            begun_s = time.perf_counter()
            ray.wait(refs, num_returns=len(refs), timeout=0)
            took_ms.append(1e3 * (time.perf_counter() - begun_s))
        rows.append({"replies": count, "ms": statistics.median(took_ms)})
    ray.shutdown()
    return rows


def measure() -> bytes:
    """A real measurement, to be answered again and again."""
    code = "import pickle, sys; from workloads.trial import run_trial; from workloads.contract import Rank;"
    code += "words = dict(m=64, n=64, k=64, dtype='fp32', repeats=30);"
    code += "sys.stdout.buffer.write(pickle.dumps(run_trial('matmul', words, Rank())))"
    return subprocess.run([sys.executable, "-c", code], env=environment(), check=True, capture_output=True).stdout


def memory_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}


# ── all of it ───────────────────────────────────────────────────────────────────────────────────────────────

SHAPES = ((1, 1), (10, 1), (100, 1), (NODES, 1), (NODES, 8))  # nodes, and GPUs of a trial


def part(name: str, *words: str) -> Any:
    """What one part finds, in a process of its own."""
    done = subprocess.run(
        [sys.executable, __file__, "--part", name, *words], env=environment(), capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(f"{name} {words}\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def all_parts(said: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The largest sweep beside all the others: two processes at a time. What is kept already is not measured again."""
    kept = said.parts or folder
    measured = kept / "measured"
    if not measured.exists():
        measured.write_text(measure().hex())
    named = {}
    for nodes, gpus in SHAPES:
        trials = said.trials if (nodes, gpus) == (NODES, 1) else min(10_000, said.trials)
        named[f"drive-{nodes}-{gpus}"] = ["drive", "--nodes", str(nodes), "--gpus", str(gpus), "--trials", str(trials)]
    named |= {"samplers": ["samplers", "--trials", str(said.trials)], "waiting": ["waiting"]}
    named |= {"record": ["record", "--recorded", str(said.recorded)]}

    def found(name: str) -> Any:
        path = kept / f"{name}.json"
        if not path.exists():
            path.write_text(json.dumps(part(*named[name], "--measured", str(measured))))
        return json.loads(path.read_text().splitlines()[-1])

    largest = f"drive-{NODES}-1"
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(found, largest)
        others = pool.submit(lambda: {name: found(name) for name in named if name != largest})
        return others.result() | {largest: first.result()}


def table(heading: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [heading, ["---:"] * len(heading), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


PARTS = ("ask", "hand out", "collect", "figures", "tell", "state", "other")


def written(found: dict[str, Any], trials: int, recorded: int) -> str:
    versions = ", ".join(f"{name} {version(name)}" for name in ("ray", "optuna", "mlflow"))
    one = found[f"drive-{NODES}-1"]

    def work(row: dict[str, Any]) -> list[str]:
        return [*(f"{row['ms'][name]:.2f}" for name in PARTS), f"{sum(row['ms'].values()):.2f}"]

    by_trials = []
    for r in one["rows"]:
        journal_mb = r["journal_bytes"] * r["trials"] / 1e6
        busy = [f"{r['per_s']:.0f}", f"{100 * (1 - r['idle']):.0f}%", f"{r['memory_mib']:,.0f}", f"{journal_mb:,.0f}"]
        by_trials.append([f"{r['trials']:,}", *work(r), *busy])
    by_gangs = []
    for nodes, gpus in SHAPES:
        of = found[f"drive-{nodes}-{gpus}"]
        row = next(r for r in reversed(of["rows"]) if r["trials"] <= 10_000)
        shape = [f"{nodes:,}", gpus, f"{of['gangs']:,}", f"{row['trials']:,}"]
        by_gangs.append([*shape, *work(row), f"{of['all_busy_s']:.1f}"])
    asked = [[f"{r['trials']:,}", *(f"{r[n]:.1f}" if n in r else "" for n in SAMPLERS)] for r in found["samplers"]]
    books = []
    for r in found["record"]:
        figures = [f"{r['ms']:.1f}", f"{r['wall_ms']:.1f}", f"{r['bytes'] / 1e3:.1f}", f"{r['look_s']:.2f}"]
        books.append([f"{r['trials']:,}", *figures, f"{r['memory_mib']:.0f}"])
    waits = [[f"{r['replies']:,}", f"{r['ms']:.2f}"] for r in found["waiting"]]
    last, resumed = one["rows"][-1], one["resume"]
    parts = [f"{name} ms" for name in PARTS]
    by_sampler = {name: f"{found['samplers'][-1][name]:,.1f}" for name in SAMPLERS if name in found["samplers"][-1]}
    sums = {r["trials"]: sum(r["ms"].values()) for r in one["rows"]}
    early = min(sums, key=lambda mark: abs(mark - 10_000))
    grown, log = sums[last["trials"]] / sums[early], math.log(last["trials"]) / math.log(early)
    trial_s, record_kb = statistics.mean(TRIAL_S), last["journal_bytes"] / 1e3
    ends = one["gangs"] / trial_s
    written_per_s = 1e3 / found["record"][-1]["ms"]
    return f"""# What the driver costs as sweeps and clusters grow

`python benchmarks/scale.py --trials {trials} --recorded {recorded}`. Simulated: there was no GPU, and one node.

{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, {versions}.
One run. A figure is the mean over the {WINDOW:,} trials before the number at its left, in CPU time of the process, so
that other work on the machine enters little. The study was on a RAM disk: waiting for a disk, three times a trial,
comes on top. A trial takes {TRIAL_S[0]:.0f} to {TRIAL_S[1]:.0f} s.

## A trial's work, by trials: {NODES:,} nodes of {GPUS_OF_A_NODE} GPUs, {one["gangs"]:,} trials at once

{table(["trials", *parts, "sum ms", "trials/s", "driver busy", "MiB", "journal MB"], by_trials)}

From {early:,} trials to {last["trials"]:,} the sum is {grown:.2f} times as large; log n is {log:.2f} times as large.

`search=random`. Collect and other are of a round of the loop, over what came in it. MiB: what the driver's process has
grown by. Opening the sweep again after {last["trials"]:,} trials takes {resumed["s"]:.0f} s and
{resumed["memory_mib"]:,.0f} MiB.

## By trials at once

{table(["nodes", "GPUs a trial", "at once", "after trials", *parts, "sum ms", "all busy after s"], by_gangs)}

Collect grows with the gangs that a round looks through, and is shared by the trials that came in it. All busy: when the
last worker got its first trial, the workers' own start left out.

Ray's own time for asking which of so many replies are there (real Ray, wall time; the loop asks twice a round):

{table(["replies awaited", "ms"], waits)}

## Proposals: a sampler's own time, by trials that it looks at

{table(["trials", *(f"{name} ms" for name in SAMPLERS)], asked)}

Three whole numbers in a space of 10^9 points, values at random; median of {ASKS} proposals, the line on disk left out.

## MLflow: the recording process, SQLite

{table(["trials", "CPU ms a trial", "wall ms", "kB a trial", "look s", "MiB"], books)}

A trial is a run with its parameters, metrics, tags and `trial.json`, a file beside the database of about
{record_kb:.1f} kB. Wall time has the disk in it, and other work of the machine. Look: which trials are there, asked by
a resume.

## What carries further

- Samplers are Optuna's, and most look at every trial for each proposal. After {asked[-1][0]} trials one takes
  {by_sampler["tpe"]} ms with `search=tpe`, the default, {by_sampler["qmc"]} ms with `search=qmc` and
  {by_sampler["random"]} ms with `search=random`.
- {one["gangs"]:,} trials of {trial_s:.0f} s end {ends:.0f} times a second. The driver has time for that; a process
  that writes to SQLite has CPU time for {written_per_s:.0f} a second. What is behind waits in the driver's memory, is
  in the study, and is written once the sweep has ended. Other stores were not measured here.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=MARKS[-1])
    parser.add_argument("--recorded", type=int, default=10_000)
    parser.add_argument("--result", type=Path, default=REPOSITORY / "benchmarks" / "results" / "scale.md")
    parser.add_argument("--parts", type=Path, help="where what a part has found is kept: it is not measured again")
    for name in ("part", "folder", "measured"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    for name in ("nodes", "gpus"):
        parser.add_argument(f"--{name}", type=int, default=0, help=argparse.SUPPRESS)
    said = parser.parse_args()
    measured = bytes.fromhex(Path(said.measured).read_text()) if said.measured else b""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(said.folder or name)
        match said.part:
            case None:
                text = written(all_parts(said, folder), said.trials, said.recorded)
                said.result.write_text(text)
                print(text)
                return
            case "drive":
                found: Any = drive(said.nodes, said.gpus, said.trials, measured, folder)
            case "resume":
                found = resume(said.nodes, said.gpus, said.trials, folder)
            case "record":
                found = record(said.recorded, measured, folder)
            case "waiting":
                found = waiting()
            case "samplers":
                found = samplers(said.trials)
        print(json.dumps(found))


if __name__ == "__main__":
    main()
