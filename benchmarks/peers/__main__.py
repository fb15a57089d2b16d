"""Compare this project with hydra-optuna-sweeper and Ray Tune on the same 60 trials of uneven duration, four at once.

    python -m benchmarks.peers --tune ENV --hydra ENV [--seeds 3] [--only TEXT] [--rows FILE]

ENV are folders of virtual environments: one has `ray[tune]`, the other hydra-optuna-sweeper and hydra-ray-launcher.
Each run gets a Ray cluster of four CPUs, started before its clock. The trials of `table.py` sleep: two cores suffice.
`programs/` holds what a user of each tool writes. A row of `--rows` is one run as JSON; existing ones are not repeated.
"""

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.peers.figures import count_loss, idle_parts, idle_share, read_trials, span_s
from benchmarks.peers.page import render
from benchmarks.peers.processes import WORKERS, kill_all, ray_cluster, start_driver, wait_for_driver
from benchmarks.peers.table import make_table
from benchmarks.peers.tools import KILLED, WHOLE, Tool

KILL_AFTER = 30  # finished trials, and a random part of a second


def run_whole(tool: Tool, python: Path, seed: int) -> dict[str, Any]:
    """Run a tool to its end and return its figures."""
    table = make_table(seed)
    with tempfile.TemporaryDirectory(prefix="peers_") as name, ray_cluster(python, Path(name), seed) as env:
        folder = Path(name)
        started_s = time.monotonic()
        wait_for_driver(start_driver(tool.command, env | dict(tool.variables), folder), folder)
        wall_s = time.monotonic() - started_s
        trials, results = read_trials(folder / "records.jsonl"), tool.read(folder)
    best = max(point.scores[-1] for point in table.values())
    return {
        "wall_s": wall_s,
        "span_s": span_s(trials),
        "idle": idle_share(trials, WORKERS),
        "idle_parts": idle_parts(trials, WORKERS),
        "trials": len(trials),
        "points": len({trial.point for trial in trials}),
        "finished": sum(trial.finished for trial in trials),
        "results": len(set(results)),
        "ideal_s": sum(point.duration_s for point in table.values()) / WORKERS,
        "found": table[results[0]].scores[-1] / best,
    }


def run_killed(tool: Tool, python: Path, seed: int) -> dict[str, Any]:
    """Kill a tool in the middle, start the same command again, and return what that cost."""
    table = make_table(seed)
    with tempfile.TemporaryDirectory(prefix="peers_") as name, ray_cluster(python, Path(name), seed) as env:
        folder = Path(name)
        records = folder / "records.jsonl"
        env |= dict(tool.variables)
        process = start_driver(tool.command, env, folder)
        while not records.exists() or sum(trial.finished for trial in read_trials(records)) < KILL_AFTER:
            if process.poll() is not None:
                raise RuntimeError(f"ended before the kill: {(folder / 'driver.log').read_text()[-3000:]}")
            time.sleep(0.1)
        time.sleep(random.Random(seed).random())
        killed_at_s = kill_all(process)
        missing = len(table) - len(tool.read(folder)) if tool.resume(0) else 0
        started_s = time.monotonic()
        wait_for_driver(start_driver([*tool.command, *tool.resume(missing)], env, folder), folder)
        rest_s = time.monotonic() - started_s
        loss = count_loss(read_trials(records), killed_at_s, tool.read(folder), table)
    return {**vars(loss), "rest_s": rest_s}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", type=Path, required=True, help="a virtual environment with ray[tune]")
    parser.add_argument("--hydra", type=Path, required=True, help="a virtual environment with Hydra's plugins")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default="", help="a regular expression: of 'whole' or 'killed' and the tool's name")
    parser.add_argument("--rows", type=Path, default=Path("peers.jsonl"))
    args = parser.parse_args()
    pythons = {"sweeper": Path(sys.executable), "tune": args.tune / "bin/python", "hydra": args.hydra / "bin/python"}
    pythons = {name: path.absolute() for name, path in pythons.items()}
    rows = [json.loads(line) for line in args.rows.read_text().splitlines()] if args.rows.exists() else []
    done = {(row["kind"], row["tool"], row["seed"]) for row in rows}
    for seed in range(args.seeds):
        for kind, tools, measure in (("whole", WHOLE, run_whole), ("killed", KILLED, run_killed)):
            for tool in tools:
                if not re.search(args.only, f"{kind} {tool.name}") or (kind, tool.name, seed) in done:
                    continue
                identity = {"kind": kind, "tool": tool.name, "seed": seed}
                row = {**identity, **measure(tool, pythons[tool.python], seed), "load": os.getloadavg()[0]}
                rows.append(row)
                with args.rows.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                print(row, file=sys.stderr, flush=True)
    print(render(rows, {name: installed(path) for name, path in pythons.items()}))


def installed(python: Path) -> dict[str, str]:
    """Return the versions of the packages of an environment that matter here."""
    names = (
        "hydra-core",
        "hydra-optuna-sweeper",
        "hydra-ray-launcher",
        "optuna",
        "sqlalchemy",
        "alembic",
        "ray",
        "mlflow",
    )
    program = "import importlib.metadata as m, json, sys\nv = {d.name.lower(): d.version for d in m.distributions()}\n"
    program += "print(json.dumps({n: v[n] for n in sys.argv[1:] if n in v}))"
    out = subprocess.run([python, "-c", program, *names], check=True, capture_output=True, text=True).stdout
    versions: dict[str, str] = json.loads(out)
    return versions


if __name__ == "__main__":
    main()
