"""The cost of what a sweep uses beside its driver: samplers, the recording process and Ray's `wait`."""

import json
import os
import pickle
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.scale.driver import MARKS, WINDOW, memory_mib

MAX_TRIALS = {"random": 100_000, "qmc": 100_000, "cmaes": 100_000, "tpe": 100_000, "gp": 100}  # by sampler
PROPOSALS = 5
WAITS = 20


def measure_samplers(max_trials: int) -> list[dict[str, Any]]:
    """Return the median CPU time of a proposal in ms, by sampler and number of finished trials."""
    from optuna.distributions import IntDistribution
    from optuna.trial import TrialState, create_trial

    from sweeper.config.schema import Search
    from sweeper.metrics.criteria import Criteria
    from sweeper.search.sampling import Ending, SamplingStudy, make_sampler

    distributions = {name: IntDistribution(64, 65472, step=64) for name in "mnk"}
    rng = random.Random(0)
    finished: list[Any] = []
    rows: list[dict[str, Any]] = []
    for mark in [mark for mark in (100, *MARKS) if mark <= max_trials]:
        for number in range(len(finished), mark):
            params = {name: 64 * rng.randrange(1, 1024) for name in "mnk"}
            value = rng.random()
            trial = create_trial(params=params, distributions=distributions, value=value)
            finished.append((number, trial, Ending(TrialState.COMPLETE, (value,))))
        row: dict[str, Any] = {"trials": mark}
        for sampler in [sampler for sampler, limit in MAX_TRIALS.items() if mark <= limit]:
            sampling = SamplingStudy(Search(sampler), Criteria.of({"score": "maximize"}), distributions)
            sampling.load(finished, {})
            times_ms = []
            for number in range(mark, mark + PROPOSALS):
                started_s = time.process_time()
                proposal = sampling.ask(make_sampler(sampler, 0, number))
                times_ms.append(1e3 * (time.process_time() - started_s))
                sampling.drop(proposal)
            row[sampler] = statistics.median(times_ms)
        rows.append(row)
    return rows


def measure_recording(trials: int, pickled_measurement: bytes, folder: Path) -> list[dict[str, float]]:
    """Write trials to MLflow in SQLite, as the recording process does. Returns its cost at each of MARKS."""
    from dataclasses import asdict

    from sweeper.common.trials import TrialRecord, TrialStatus
    from sweeper.metrics import derivation
    from sweeper.tracking.store import Store

    os.chdir(folder)
    measurement = pickle.loads(pickled_measurement)
    derived = derivation.derive((measurement,), {"fp32": 60.0}, {}, 4.8)
    where = {"node": "n1", "pid": 4242, "gpus": "0", "log": "/tmp/ray/session_latest/logs/worker.err"}
    parent = {"started_at": "now", "params": {"sweep.gpus": 1}, "tags": {"workload": "matmul"}}
    parent |= {"artifacts": {"config.yaml": "a: 1"}}
    store = Store("sqlite:///mlflow.db", "matmul", "study", "scale", parent)
    rng = random.Random(0)
    rows = []
    window_started_s = window_started_cpu_s = 0.0
    for number in range(trials):
        params = {name: 64 * rng.randrange(1, 1024) for name in "mnk"}
        record = TrialRecord(
            number=number,
            params=params,
            status=TrialStatus.COMPLETE,
            reason="",
            detail="",
            metrics=derived,
            measurements=[asdict(measurement) | {"executed": dict(measurement.executed) | params}],
            where=where | {"pid": number},
            started_at_s=1e9,
            ended_at_s=1e9 + 60,
            elapsed_s=float(number),
        )
        store.write_trial(record)
        if number in {mark - WINDOW for mark in MARKS}:
            window_started_s, window_started_cpu_s = time.perf_counter(), time.process_time()
        if number + 1 in MARKS:
            wall_ms = 1e3 * (time.perf_counter() - window_started_s) / WINDOW
            cpu_ms = 1e3 * (time.process_time() - window_started_cpu_s) / WINDOW
            list_started_s = time.process_time()
            store.children.list_all(lambda count: None)
            row = {"trials": number + 1, "cpu_ms": cpu_ms, "wall_ms": wall_ms}
            row |= {"list_s": time.process_time() - list_started_s}
            row |= {"bytes": Path("mlflow.db").stat().st_size / (number + 1), "memory_mib": memory_mib()}
            rows.append(row)
            print(json.dumps(row), file=sys.stderr, flush=True)
    return rows


def measure_ray_wait() -> list[dict[str, float]]:
    """Return the median wall time in ms of a `ray.wait` without timeout over many replies, none of which is there."""
    import ray

    from sweeper.execution.cluster import init_ray

    class Hanging:
        async def hang(self) -> None:
            import asyncio

            await asyncio.sleep(3600)

    init_ray(address="local", num_cpus=1, object_store_memory=128 * 2**20)
    actor = ray.remote(Hanging).options(max_concurrency=20_000, num_cpus=0).remote()
    refs: list[Any] = []
    rows = []
    for count in (8, 80, 800, 8000):
        refs += [actor.hang.remote() for _ in range(count - len(refs))]
        ray.wait(refs, num_returns=len(refs), timeout=1)
        times_ms = []
        for _ in range(WAITS):
            started_s = time.perf_counter()
            ray.wait(refs, num_returns=len(refs), timeout=0)
            times_ms.append(1e3 * (time.perf_counter() - started_s))
        rows.append({"replies": count, "ms": statistics.median(times_ms)})
    ray.shutdown()
    return rows
