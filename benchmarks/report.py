"""How long `python -m sweeper.report` takes over a store of many trials.

    python benchmarks/report.py [--trials 10000] [--repeats 3] [--dir DIRECTORY]

The store is what one sweep of small products on the CPU leaves behind, in SQLite: filling it takes about 0.1 s a trial.
Given a directory that holds one already, only the report is measured again.
"""

from __future__ import annotations

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


def run(folder: Path, *words: str) -> float:
    """Seconds of a module of this project."""
    started = time.monotonic()
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]))
    subprocess.run([sys.executable, "-m", *words], cwd=folder, check=True, env={**os.environ, "PYTHONPATH": path})
    return time.monotonic() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dir", type=Path, help="where the store is kept (default: a new folder)")
    said = parser.parse_args()
    folder = said.dir or Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "mlflow.db").exists():
        run(folder, "sweeper", *SWEEP, f"budget.trials={said.trials}")
    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    (experiment,) = [found for found in client.search_experiments() if found.name != "Default"]
    pages, token = 0, ""
    while token is not None:
        page = client.search_runs([experiment.experiment_id], max_results=5000, page_token=token or None)
        pages, token = pages + len(page), page.token
    times_s = [run(folder, "sweeper.report") for _ in range(said.repeats)]
    gib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
    print(f"{os.cpu_count()} cores, Python {platform.python_version()}, mlflow {mlflow.__version__}")
    print(f"{pages:,} runs in {(folder / 'mlflow.db').stat().st_size / 2**20:.0f} MiB of SQLite")
    print(f"report: {' '.join(f'{seconds:.1f}' for seconds in sorted(times_s))} s, at most {gib:.1f} GiB")


if __name__ == "__main__":
    main()
