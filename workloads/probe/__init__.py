"""`workload=probe`: does nothing for a given time, or fails in a given way.

For rehearsing a cluster before real work goes onto it (how does a sweep take a hanging node?), for measuring
what the scheduling itself costs, and for the tests of both.
"""

from __future__ import annotations

import math
import os
import signal
import time
from dataclasses import dataclass, field
from typing import Literal

from workloads.api.contract import Measurement, Rank, Workload


@dataclass(frozen=True)
class ProbeParameters:
    """x, y: two dials with the best at (3, -1); sleep_s: how long the trial takes; behaviour: how it ends, of which
    leak takes ever more memory until something ends it.
    ledger: a file that gets a line for each time that a trial has run to its end, if one is named.
    host_gib: memory of its node that is reserved for it, and that it does not take.

    On a node whose processes have SWEEPER_PROBE=slow in their environment a trial takes twice as long, with
    SWEEPER_PROBE=fails it fails.
    """

    x: float = 0.0
    y: float = 0.0
    sleep_s: float = field(default=0.0, metadata={"min": 0})
    behaviour: Literal["ok", "raise", "hang", "out_of_memory", "leak", "killed", "lie"] = "ok"
    ledger: str = ""
    host_gib: float = field(default=0.0, metadata={"min": 0, "host_memory": True})


class Probe(Workload):
    """A trial whose score is exp(-(x-3)² - (y+1)²) and whose ending is chosen."""

    name = "probe"
    Parameters = ProbeParameters
    benchmark_version = "probe/1"
    max_world_size = None

    def run(self, parameters: ProbeParameters, rank: Rank) -> Measurement:
        start = time.perf_counter()
        print(f"probe {parameters}", flush=True)
        node_is = os.environ.get("SWEEPER_PROBE", "")
        time.sleep(parameters.sleep_s * (2 if node_is == "slow" else 1))
        if node_is == "fails":
            raise RuntimeError("this node was told to fail")
        executed = {name: getattr(parameters, name) for name in parameters.__dataclass_fields__}
        match parameters.behaviour:
            case "raise":
                raise RuntimeError("the probe was told to raise")
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
