"""Run sweeps that write concurrently to one MLflow server with PostgreSQL and authentication.

    python -m benchmarks.store [--sweeps 8] [--trials 10000] [--alone 1250] [--sleep-s 0.1] [--interrupt]

Needs `mlflow[auth]`, `psycopg2-binary` and PostgreSQL. Everything runs on this machine: PostgreSQL, MLflow's server
with its basic authentication in front of it, and a Ray node with one counted device for each sweep. The probe sweeps
start together and share `--trials` trials, which sleep for `--sleep-s`. With `--interrupt`, SIGTERM stops the server
when a third of the trials is in the store, and SIGKILL kills it at two thirds. The server restarts each time.

Before that, one sweep with `--alone` trials runs alone, first on its own SQLite file, then on the server. A row gives
the number of trials, and of trials without a complete run (lost), with several runs (doubled), with a metric that
differs from the study (wrong), and that ran to completion more than once. It also gives unfinished runs, deadlocks that
PostgreSQL resolved, restarts of commands, and per trial the wall time, the CPU time of the server and the database, and
the CPU time of the commands with startup and shutdown. Finally, the report reads the results of all sweeps.
"""

import argparse
import os
import platform
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

from tests.support.shared_store import SharedStore, missing_reason
from tests.support.store_load import LocalRay, SharedOutcome, SharedSweeps, restart_by, run_alone

COLUMNS = ["sweeps", "trials", "lost", "doubled", "wrong", "run twice", "not finished", "deadlocks", "started again"]
COLUMNS += ["took", "ms per trial", "CPU ms of the store", "CPU ms of the commands"]
LIMIT_S = 4 * 3600.0


def print_row(label: str, outcome: SharedOutcome) -> None:
    counts = [outcome.trials, outcome.lost, outcome.doubled, outcome.wrong, outcome.repeated, outcome.running]
    seconds = (outcome.duration_s, outcome.store_cpu_s, outcome.commands_cpu_s)
    per_trial = [f"{1e3 * amount_s / outcome.trials:.0f}" for amount_s in seconds]
    cells = [*counts, outcome.deadlocks, sum(outcome.starts) - len(outcome.starts), f"{outcome.duration_s:.0f} s"]
    print("|", " | ".join(map(str, [label, *cells, *per_trial])), "|", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweeps", type=int, default=8)
    parser.add_argument("--trials", type=int, default=10_000, help="of all sweeps together")
    parser.add_argument("--alone", type=int, help="of the single sweeps; by default as many as each of the others has")
    parser.add_argument("--sleep-s", type=float, default=0.1, help="the duration of a trial")
    parser.add_argument("--interrupt", action="store_true", help="stop and kill the server in the middle")
    args = parser.parse_args()
    if reason := missing_reason():
        sys.exit(reason)
    share = args.trials // args.sweeps
    alone = args.alone or share
    versions = ", ".join(f"{name} {version(name)}" for name in ("mlflow", "sqlalchemy", "psycopg2-binary", "ray"))
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, {versions}\n")
    print("|", " | ".join(COLUMNS), "|\n|---" + "|---:" * (len(COLUMNS) - 1) + "|", flush=True)
    with tempfile.TemporaryDirectory() as name, LocalRay(Path(name), args.sweeps) as ray:
        folder = Path(name)
        alone_s, cpu_s = run_alone(folder, ray, alone, args.sleep_s)
        blank = " | " * 7
        figures = [f"{alone_s:.0f} s", f"{1e3 * alone_s / alone:.0f}", "", f"{1e3 * cpu_s / alone:.0f}"]
        print("| 1, SQLite |", alone, blank, "|", " | ".join(figures), "|", flush=True)
        with SharedStore() as store:
            outcome = SharedSweeps(folder, ray, store, 1, alone, args.sleep_s, "first").run({}, LIMIT_S)
            print_row("1, server", outcome)
        with SharedStore() as store:
            sweeps = SharedSweeps(folder, ray, store, args.sweeps, share, args.sleep_s, "second")
            restarts = restart_by(store) if args.interrupt else {}
            print_row(f"{args.sweeps}, server", sweeps.run(restarts, LIMIT_S))
            started_s = time.monotonic()
            size = len(sweeps.report("html"))
            print(f"\nThe report on all of them took {time.monotonic() - started_s:.0f} s, {size / 2**20:.1f} MiB.")


if __name__ == "__main__":
    main()
