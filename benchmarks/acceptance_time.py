"""Simulate how long `sweeper accept profile=quick` takes: `python -m benchmarks.acceptance_time` prints a table.

The command plans, runs and judges the tests of nodes with 8 GPUs, and writes its files. Only the workers are simulated.
"""

import json
import math
import tempfile
import time
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.acceptance_page import PER_NODE, make_state
from sweeper.commands.accept import main, measure
from sweeper.commands.doctor import exercise
from sweeper.common.trials import Trial, TrialResult, TrialStatus
from sweeper.config.catalogue import catalogue
from sweeper.execution import cluster
from sweeper.preflight.devices import planned_target
from workloads.api.contract import Measurement

# Seconds of one run on two H200s, each a node: before workers start, their start, each test, and after the last test.
COMMAND_S, WORKERS_S, END_S = 5.0, 14.0, 13.0
TESTS_S = {"alone": 31.0, "parallel": 15.0, "collectives": 1.0, "to_device": 2.5, "from_device": 1.5, "memory": 0.5}
TESTS_S |= {"fp8": 5.5, "bf16": 6.0}
# The driver's calls on two cores, with workers that never start: start and end of a worker, and polling of a gang.
START_S, KILL_S, POLL_S = 0.75e-3, 0.5e-3, 0.17e-3
NODES = (2, 8, 64, 128, 256, 512)
STEPS_S = (1e-3,) * 30
FAST = {"bytes_per_step": 1e13, "flops_per_step": 1e16, "tokens_per_step": 10**9, "metrics": {"bus_gb_s": 1e4}}
MEASUREMENT = Measurement({}, STEPS_S, sustained_step_times_s=STEPS_S, **FAST)  # above every limit


class Clock:
    """Replaces the module `time`: the CPU time of this process, and the time that passes without work."""

    passed_s = 0.0
    time = monotonic = lambda self: time.process_time() + self.passed_s

    def sleep(self, seconds: float) -> None:
        self.passed_s += seconds


class Pool:
    """Replaces the pool of gangs of a job: each test takes its time."""

    def __init__(self, _: Any, spec: Any, count: int) -> None:
        self.ranks = spec.resources.ranks
        CLOCK.sleep(START_S * self.ranks)
        self.ends_s = CLOCK.monotonic() + WORKERS_S

    def use_workload(self, name: str, *, waits_for_all: bool) -> None:
        self.name = "alone" if name == "parallel" and waits_for_all else name

    def submit(self, trial: Trial) -> None:
        test = f"{self.name} {trial.params}"
        self.ends_s = max(CLOCK.monotonic(), self.ends_s) + next(TESTS_S[name] for name in TESTS_S if name in test)

    def wait(self, _: float) -> list[tuple[Trial, TrialResult]]:
        CLOCK.sleep(POLL_S)
        done = TrialResult(TrialStatus.COMPLETE, 0.0, 0.0, measurements=(MEASUREMENT,) * self.ranks, reusable=True)
        return [(Trial(0, {}), done)] * (CLOCK.monotonic() >= self.ends_s)

    def close(self) -> None:
        CLOCK.sleep(KILL_S * self.ranks)


CLOCK = Clock()


def simulate(nodes: int, folder: Path) -> tuple[float, float, float, list[str]]:
    """Return when the tests and the command end, the driver's CPU seconds, and the tests that lack a result."""
    planned, names, tests_s = planned_target(catalogue()["h200"], PER_NODE), [f"n{n}" for n in range(nodes)], [0.0]
    node = replace(planned.nodes[0], gpus=PER_NODE, cpus=192)
    target = replace(planned, nodes=tuple(replace(node, address=name) for name in names))
    states = {name: make_state(name) for name in names}
    watches = SimpleNamespace(states=states, update=lambda: tests_s.append(CLOCK.monotonic()))
    vars(main).update(time=CLOCK)
    vars(measure).update(time=CLOCK, GangPool=Pool)
    vars(exercise).update(NodeWatches=lambda *_: watches)
    vars(cluster).update(dict.fromkeys(("start", "stop"), lambda *_, **__: None))
    vars(cluster).update(find_target=lambda *_: (target, [*target.nodes]))
    started_s, started_cpu_s = CLOCK.monotonic() - COMMAND_S, time.process_time()
    with redirect_stdout(StringIO()):
        main.accept(main.AcceptRequest(dir=str(folder)))
    driver_s = time.process_time() - started_cpu_s
    rows = json.loads(next(folder.glob("acceptance/*/accept.json")).read_text())["results"]
    missing = sorted({row["test"] for row in rows if row["problem"]})
    return tests_s[-1] - started_s, CLOCK.monotonic() - started_s + END_S, driver_s, missing


def tabulate() -> Iterator[str]:
    """Yield the lines of a table, the last one without the limit of time."""
    yield "| nodes | tests end after | command ends after | driver's CPU | tests cut short |\n|---|---|---|---|---|"
    for nodes, limit_s in [*((nodes, main.LONGEST_S["quick"]) for nodes in NODES), (NODES[-1], math.inf)]:
        main.LONGEST_S["quick"] = limit_s
        with tempfile.TemporaryDirectory() as folder:
            tests_s, ends_s, driver_s, missing = simulate(nodes, Path(folder))
        limited = "" if limit_s < math.inf else ", without a limit"
        times = f"{tests_s:.0f} s | {ends_s:.0f} s | {driver_s:.1f} s"
        yield f"| {nodes}{limited} | {times} | {', '.join(missing) or 'none'} |"


if __name__ == "__main__":
    for line in tabulate():
        print(line, flush=True)
