"""`workload=probe`: sleep for a given time, or fail in a given way.

The probe injects faults (hangs, crashes, wrong results) to test a cluster before real work runs on it, and measures the
overhead of scheduling. The tests use it for both purposes.
"""

import math
import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from workloads.api.contract import HostBusy, Measurement, Rank, Workload


@dataclass(frozen=True)
class ProbeParameters:
    """Parameters of one trial.

    On a node whose processes have SWEEPER_PROBE=slow in their environment, a trial takes twice as long; with
    SWEEPER_PROBE=fails, it fails.

    Attributes:
        x, y: search parameters; the best score is at (3, -1).
        sleep_s: seconds that the trial sleeps.
        behaviour: how the trial ends. `disturbed` ends it as a busy host would (only once if there is a ledger); `leak`
            allocates memory until the process is killed; `lie` reports an x other than the requested x.
        ledger: path of a file to which each rank that runs to its end appends a line; empty for no file.
        host_gib: GiB of the node's memory that are reserved for the trial, which does not allocate them.
    """

    x: float = 0.0
    y: float = 0.0
    sleep_s: float = field(default=0.0, metadata={"min": 0})
    behaviour: Literal["ok", "raise", "hang", "out_of_memory", "leak", "killed", "lie", "disturbed"] = "ok"
    ledger: str = ""
    host_gib: float = field(default=0.0, metadata={"min": 0, "host_memory": True})


class Probe(Workload):
    """A trial that ends as `behaviour` specifies. The score is exp(-(x-3)² - (y+1)²)."""

    name = "probe"
    Parameters = ProbeParameters
    ways = ("sleep_s", "behaviour", "ledger", "host_gib")
    benchmark_version = "probe/1"
    max_world_size = None
    finalists = 0  # it measures nothing

    def run(self, parameters: ProbeParameters, rank: Rank) -> Measurement:
        start = time.perf_counter()
        node_behaviour = os.environ.get("SWEEPER_PROBE", "")
        time.sleep(parameters.sleep_s * (2 if node_behaviour == "slow" else 1))
        if node_behaviour == "fails":
            raise RuntimeError("this node was told to fail (SWEEPER_PROBE=fails)")
        executed = {name: getattr(parameters, name) for name in parameters.__dataclass_fields__}
        match parameters.behaviour:
            case "raise":
                raise RuntimeError("the probe was told to raise (behaviour=raise)")
            case "hang":
                time.sleep(1e6)
            case "out_of_memory":
                import torch

                torch.empty(1 << 60, dtype=torch.uint8, device=rank.device)
            case "leak":
                leaked = []
                while True:
                    leaked.append(b"x" * (10 << 20))
                    time.sleep(0.05)
            case "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            case "disturbed":
                mark = Path(f"{parameters.ledger}.{parameters.x:g}")  # left by an earlier trial with this x
                if not (parameters.ledger and mark.exists()):
                    if parameters.ledger:
                        mark.touch()
                    raise HostBusy("the probe was told to be disturbed (behaviour=disturbed)")
            case "lie":
                executed["x"] = parameters.x + 1
        if parameters.ledger:
            with open(parameters.ledger, "a") as ledger:
                ledger.write(f"{parameters.x} {parameters.y} {rank.rank}\n")
        return Measurement(
            executed=executed,
            step_times_s=(time.perf_counter() - start,),
            metrics={"score": math.exp(-((parameters.x - 3) ** 2) - (parameters.y + 1) ** 2)},
            machine_info={"rank": rank.rank, "world_size": rank.world_size, "pid": os.getpid()},
        )
