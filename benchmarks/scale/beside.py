"""What a sweep takes beside its driver: the samplers' proposals, the recording process, and Ray's own waiting."""

from __future__ import annotations

import json
import os
import pickle
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.scale.driver import MARKS, WINDOW, memory_mib

SAMPLERS = {"random": 100_000, "qmc": 100_000, "cmaes": 100_000, "tpe": 100_000, "gp": 100}  # up to
ASKS = 5


def samplers(most: int) -> list[dict[str, Any]]:
    """What the next proposal takes by each sampler among so many trials, in ms of CPU, the median of a few."""
    from optuna.trial import TrialState, create_trial

    from sweeper.config.space import Range, Space
    from sweeper.search.study import Study

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


def record(trials: int, measured: bytes, folder: Path) -> list[dict[str, float]]:
    """Write as many trials to MLflow in SQLite, as the recording process does; its work along the way."""
    from dataclasses import asdict

    from sweeper.common import metrics
    from sweeper.common.trials import TrialRecord, TrialStatus
    from sweeper.tracking.process import Store

    os.chdir(folder)
    one = pickle.loads(measured)
    figures = metrics.derive((one,), {"fp32": 60.0}, {}, 4.8)
    where = {"node": "n1", "pid": 4242, "gpus": "0", "log": "/tmp/ray/session_latest/logs/worker.err"}
    parent = {"began": "now", "params": {"sweep.gpus": 1}, "tags": {"workload": "matmul"}}
    parent |= {"artifacts": {"config.yaml": "a: 1"}}
    store, chance, rows = Store("sqlite:///mlflow.db", "matmul", "study", "scale", parent), random.Random(0), []
    begun_s = cpu_s = 0.0
    for number in range(trials):
        params = {name: 64 * chance.randrange(1, 1024) for name in "mnk"}
        measurements = [asdict(one) | {"executed": dict(one.executed) | params}]
        where["pid"] = number
        store.write(
            TrialRecord(
                number, params, TrialStatus.COMPLETE, "", "", figures, measurements, where, 1e9, 1e9 + 60, float(number)
            )
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

    from sweeper.execution.cluster import _init

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
