"""Measure how long `python -m sweeper report` takes on a store of many trials.

    python benchmarks/report.py [--trials 10000] [--repeats 3] [--dir DIRECTORY]

The store is that of one sweep of small matrix products on the CPU, in SQLite: filling it takes about 0.1 s per trial.
If the directory already has a store, only the report is measured again.
"""

import argparse
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import mlflow
from mlflow import MlflowClient

REPOSITORY = Path(__file__).resolve().parent.parent
SWEEP = ["workload=matmul", "hardware=cpu", "search=random", "finals.top=0", "progress=never", "first=[]"]
SWEEP += ["space.m=range(1,201)", "space.n=range(1,201)", "space.k=16", "space.repeats=5", "space.warmup=0"]


def run_module(folder: Path, *arguments: str) -> float:
    """Run a module of this project in `folder` and return how long it took, in seconds."""
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]))
    started = time.monotonic()
    subprocess.run([sys.executable, "-m", *arguments], cwd=folder, check=True, env={**os.environ, "PYTHONPATH": path})
    return time.monotonic() - started


def count_runs(database: Path) -> int:
    """Return the number of runs of the sweep in an MLflow store."""
    client = MlflowClient(f"sqlite:///{database}")
    (experiment,) = [experiment for experiment in client.search_experiments() if experiment.name != "Default"]
    runs = 0
    token: str | None = ""
    while token is not None:
        page = client.search_runs([experiment.experiment_id], max_results=5000, page_token=token or None)
        runs += len(page)
        token = page.token
    return runs


def main() -> None:
    """Fill the store if it does not exist, measure the report and print its times and memory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dir", type=Path, help="directory of the store (default: a new one)")
    args = parser.parse_args()
    folder = args.dir or Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    database = folder.resolve() / "mlflow.db"
    if not database.exists():
        run_module(folder, "sweeper", *SWEEP, f"budget.trials={args.trials}")
    runs = count_runs(database)
    times_s = [run_module(folder, "sweeper", "report") for _ in range(args.repeats)]
    memory_gib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
    print(f"{os.cpu_count()} cores, Python {platform.python_version()}, mlflow {mlflow.__version__}")
    print(f"{runs:,} runs in {database.stat().st_size / 2**20:.0f} MiB of SQLite")
    print(f"report: {' '.join(f'{time_s:.1f}' for time_s in sorted(times_s))} s, at most {memory_gib:.1f} GiB")


if __name__ == "__main__":
    main()
