"""The driver on 1,000 simulated nodes of 8 GPUs that fail at random: what is run again, and what waits.

    python -m benchmarks.scale.node_faults

Nodes fail at the rate of the report on the training of Llama 3, times a factor that makes failures frequent enough to
average over, with repairs that are faster by the same factor: so the number of nodes that are down does not change.
Each row runs in a process of its own.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.scale.__main__ import environment, measure_matmul
from benchmarks.scale.driver import CallTimer, build_plan, memory_mib, remember_metrics, replace_ray
from benchmarks.scale.failing_nodes import FailingCluster, SimulationEnded
from benchmarks.scale.node_fault_costs import CASES, NODES, WARM_UP_S, Case, render_tables


def simulate(case: Case, pickled_measurement: bytes, folder: Path) -> dict[str, float]:
    """Run the real driver over a failing cluster. Returns what happened in the counted hours, and the driver's cost."""
    from sweeper.commands.sweep import loop
    from sweeper.common.trials import TrialStatus
    from sweeper.execution import cluster, gang_launcher, gang_pool, node_monitor
    from sweeper.search.study import Study

    end_s = WARM_UP_S + 3600 * case.hours
    simulation = FailingCluster(pickled_measurement, NODES, case.gpus, case.trial_s, case.failures, WARM_UP_S, end_s)
    timer = CallTimer(simulation)
    replace_ray(simulation)
    remember_metrics()
    node_monitor.time = simulation
    gang_launcher.placement_group = simulation.placement_group
    gang_launcher.remove_placement_group = simulation.remove_placement_group
    gang_launcher.PlacementGroupSchedulingStrategy = lambda group, bundle: (group, bundle)
    timer.patch(node_monitor.NodeMonitor, "poll_changes", "nodes")
    timer.patch(gang_pool.GangPool, "set_target", "target")
    timer.patch(gang_pool.GangPool, "wait", "wait")
    timer.patch(gang_pool.GangPool, "submit", "submit")
    timer.patch(Study, "ask", "ask")
    timer.patch(Study, "tell", "tell")
    initial_mib = memory_mib()
    limits = ["budget.trials=100000000", f"trial.timeout_s={3 * case.trial_s}", "search=random"]
    plan = build_plan(folder, NODES, case.gpus, *limits)
    template = plan.target.nodes[0]

    def poll(_: Any, known: set[str]) -> tuple[list[Any], set[str]]:
        up = simulation.list_up()
        joined = [replace(template, address=address, id=id) for id, address in up.items() if id not in known]
        return joined, set(up)

    cluster.NodeDiscovery.poll = poll
    running = loop.Sweep(plan, ["sweeper"])
    running._progress.start()
    started_s = time.process_time()
    with suppress(SimulationEnded):
        running._run_trials(plan.resources.gangs, running._has_trials, running._study.ask)
    cpu_s = time.process_time() - started_s - simulation.own_s - timer.own_s
    running._opened.lock.close()
    trials, rounds = running._progress.finished_trials, len(timer.calls["wait"])
    idle_s = sorted(timer.calls["wait"])[rounds // 10]
    return {
        **asdict(simulation.usage),
        "gangs": plan.resources.gangs,
        "trials": trials,
        "lost": running._progress.counts[TrialStatus.LOST],
        "drained": len(running._nodes.drained),
        "trial_ms": 1e3 * (cpu_s - idle_s * rounds) / trials,
        "round_ms": 1e3 * idle_s,
        "change_ms": 1e3 * timer.sum_s("nodes", "target") / len(timer.calls["target"]),
        "longest_ms": 1e3 * max(*timer.calls["nodes"], *timer.calls["target"]),
        "busy": (cpu_s + idle_s * simulation.skipped_rounds) / end_s,
        "trial_mib": (memory_mib() - initial_mib) / trials,
        "journal_kb": (running._plan.folder / "study.journal").stat().st_size / trials / 1e3,
    }


def run_case(number: int, measured: Path) -> dict[str, float]:
    """Run one case in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.scale.node_faults", "--case", str(number), "--measured", str(measured)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{CASES[number]}\n{done.stderr[-4000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--measured", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if args.case is not None:
            print(json.dumps(simulate(CASES[args.case], args.measured.read_bytes(), folder)))
            return
        measured = folder / "measured"
        measured.write_bytes(measure_matmul())
        print(render_tables([run_case(number, measured) for number in range(len(CASES))]))


if __name__ == "__main__":
    main()
