"""Measure the overhead per trial of this project and of Ray Tune, with the same 200 trials that do nothing.

    python benchmarks/overhead.py [--trials 200] [--at-once 2] [--repeats 3]

Needs the extra `bench` (Ray Tune). Both search the same two-dimensional space with Optuna's TPE and the same number of
concurrent trials, on their own Ray cluster of this machine's cores, and record every trial in a new MLflow store on
SQLite. The two alternate `--repeats` times, each in its own process.

Then 200 trials sleep for 20 ms, one at a time. The benchmark prints the worker's busy share of the time between the
start of the first trial and the end of the last.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent

TUNE = """
import sys, time
import ray
from ray import tune
from ray.air.integrations.mlflow import MLflowLoggerCallback
from ray.tune.search.optuna import OptunaSearch
import optuna

trials, at_once, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
def nothing(config):
    return {"score": -(config["x"] - 3) ** 2 - (config["y"] + 1) ** 2}
ray.init(num_cpus=at_once, include_dashboard=False, log_to_driver=False)
started = time.monotonic()
tuner = tune.Tuner(
    nothing,
    param_space={"x": tune.uniform(-10, 10), "y": tune.uniform(-10, 10)},
    tune_config=tune.TuneConfig(
        num_samples=trials, max_concurrent_trials=at_once, metric="score", mode="max",
        search_alg=OptunaSearch(sampler=optuna.samplers.TPESampler(seed=0)),
    ),
    run_config=tune.RunConfig(
        storage_path=folder, verbose=0,
        callbacks=[MLflowLoggerCallback(tracking_uri=f"sqlite:///{folder}/mlflow.db", experiment_name="nothing")],
    ),
)
results = tuner.fit()
assert len(results) == trials and not results.errors
print("searched_s", time.monotonic() - started)
"""


def count_recorded_runs(folder: Path) -> int:
    """Return the number of runs with a score in the MLflow store, to check that both did the same work."""
    import sqlite3

    store = sqlite3.connect(folder / "mlflow.db")
    of_parent = "select run_uuid from latest_metrics where key = 'best_score'"
    query = f"select count(distinct run_uuid) from latest_metrics where key = 'score' and run_uuid not in ({of_parent})"
    return int(store.execute(query).fetchone()[0])


def run_timed(command: list[str], folder: Path) -> tuple[float, str]:
    """Run a command. Return the wall seconds of the whole process and its standard output."""
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY), "RAY_USAGE_STATS_ENABLED": "0", "RAY_AIR_NEW_OUTPUT": "0"}
    started_s = time.monotonic()
    process = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    wall_s = time.monotonic() - started_s
    if process.returncode:
        sys.exit(f"{command}\n{process.stdout[-2000:]}\n{process.stderr[-4000:]}")
    return wall_s, process.stdout


def run_tune(trials: int, at_once: int) -> dict[str, float]:
    """Run the trials with Ray Tune. Return the wall seconds of the process and of its search."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "tune_nothing.py").write_text(TUNE)
        wall_s, out = run_timed([sys.executable, "tune_nothing.py", str(trials), str(at_once), name], folder)
        assert count_recorded_runs(folder) == trials
        searched_s = float(out.split("searched_s")[1].split()[0])
        return {"wall_s": wall_s, "searched_s": searched_s}


def run_sweeper(trials: int, at_once: int, sleep_s: float = 0.0) -> dict[str, float]:
    """Run the trials with this project. Return the same times and the share of time in which workers were busy."""
    overrides = ["workload=probe", "hardware=cpu", "progress=never", f"budget.trials={trials}"]
    overrides += [f"cluster.max_concurrent_trials={at_once}", f"space.sleep_s={sleep_s}"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wall_s, _ = run_timed([sys.executable, "-m", "sweeper", *overrides], folder)
        assert count_recorded_runs(folder) == trials
        (journal,) = folder.glob("sweeps/*/study.journal")
        records = [
            line["user_attr"]["record"]
            for line in map(json.loads, journal.read_text().splitlines())
            if "record" in line.get("user_attr", {})
        ]
        first_start_s = min(record["started_at_s"] for record in records)
        last_end_s = max(record["ended_at_s"] for record in records)
        busy_s = sum(record["ended_at_s"] - record["started_at_s"] for record in records)
        return {
            "wall_s": wall_s,
            "searched_s": max(record["elapsed_s"] for record in records),
            "busy": busy_s / (last_end_s - first_start_s) / at_once,
        }


def main() -> None:
    """Run the command line and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    sweeper_runs: list[dict[str, float]] = []
    tune_runs: list[dict[str, float]] = []
    busy_shares: list[float] = []
    for _ in range(args.repeats):
        sweeper_runs.append(run_sweeper(args.trials, args.at_once))
        tune_runs.append(run_tune(args.trials, args.at_once))
        busy_shares.append(run_sweeper(args.trials, 1, sleep_s=0.02)["busy"])

    def per_trial_ms(runs: list[dict[str, float]], key: str) -> str:
        values = sorted(1e3 * run[key] / args.trials for run in runs)
        return f"{statistics.median(values):.1f} ({values[0]:.1f} to {values[-1]:.1f})"

    def row(label: str, key: str) -> str:
        ratio = statistics.median(run[key] for run in tune_runs) / statistics.median(run[key] for run in sweeper_runs)
        return f"| {label} | {per_trial_ms(sweeper_runs, key)} | {per_trial_ms(tune_runs, key)} | {ratio:.1f} |"

    versions = ", ".join(f"{name} {version(name)}" for name in ("ray", "optuna", "mlflow"))
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, {versions}")
    print(
        f"{args.trials} trials that do nothing, {args.at_once} at once; median (least to most) of {args.repeats} runs\n"
    )
    print("| ms a trial | sweeper | Ray Tune | Tune / sweeper |")
    print("|---|---:|---:|---:|")
    print(row("searching", "searched_s"))
    print(row("whole process", "wall_s"))
    percents = sorted(100 * share for share in busy_shares)
    print(f"\n20 ms trials, one at a time: the worker is busy {statistics.median(percents):.1f}% of the time")
    print(f"({percents[0]:.1f} to {percents[-1]:.1f}% over {args.repeats} runs)")


if __name__ == "__main__":
    main()
