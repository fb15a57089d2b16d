"""What a trial costs beside its own work: this project and Ray Tune, the same 200 trials of nothing, side by side.

    python benchmarks/overhead.py [--trials 200] [--at-once 2] [--repeats 3]

Needs the extra `bench` (Ray Tune). Both search the same two-dimensional space with Optuna's TPE, with the same
number of trials at once, on a Ray cluster of this machine's cores that each starts itself, and record every
trial in a fresh MLflow store on SQLite. Each side runs in a process of its own, alternating, `--repeats` times.

Then 200 trials that sleep for 20 ms, one at a time: how much of the time between the first trial's start and
the last one's end was the worker at work?
"""

from __future__ import annotations

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


def recorded_runs(folder: Path) -> int:
    """How many finished runs with a score the MLflow store holds: both sides have to have done the same work."""
    import sqlite3

    store = sqlite3.connect(folder / "mlflow.db")
    query = "select count(distinct run_uuid) from latest_metrics where key = 'score'"
    return int(store.execute(query).fetchone()[0])


def timed(command: list[str], folder: Path) -> tuple[float, str]:
    """Wall seconds of a whole process, and what it printed."""
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY), "RAY_USAGE_STATS_ENABLED": "0", "RAY_AIR_NEW_OUTPUT": "0"}
    started = time.monotonic()
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    wall_s = time.monotonic() - started
    if done.returncode:
        sys.exit(f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return wall_s, done.stdout


def run_tune(trials: int, at_once: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "tune_nothing.py").write_text(TUNE)
        wall_s, out = timed([sys.executable, "tune_nothing.py", str(trials), str(at_once), name], folder)
        assert recorded_runs(folder) == trials
        searched_s = float(out.split("searched_s")[1].split()[0])
        return {"wall_s": wall_s, "searched_s": searched_s}


def run_ours(trials: int, at_once: int, sleep_s: float = 0.0) -> dict[str, float]:
    words = [
        "workload=probe",
        f"budget.trials={trials}",
        f"cluster.max_concurrent_trials={at_once}",
        f"space.sleep_s={sleep_s}",
    ]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wall_s, _ = timed([sys.executable, "-m", "sweeper", *words, "hardware=cpu", "progress=never"], folder)
        assert recorded_runs(folder) == trials
        (journal,) = folder.glob("sweeps/*/study.journal")
        records = [
            json.loads(line["user_attr"]["record"])
            for line in map(json.loads, journal.read_text().splitlines())
            if "record" in line.get("user_attr", {})
        ]
        first, last = min(r["started_at_s"] for r in records), max(r["ended_at_s"] for r in records)
        busy_s = sum(r["ended_at_s"] - r["started_at_s"] for r in records)
        return {
            "wall_s": wall_s,
            "searched_s": max(r["elapsed_s"] for r in records),
            "busy": busy_s / (last - first) / at_once,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    said = parser.parse_args()
    ours, tune, busy = [], [], []
    for _ in range(said.repeats):
        ours.append(run_ours(said.trials, said.at_once))
        tune.append(run_tune(said.trials, said.at_once))
        busy.append(run_ours(said.trials, 1, sleep_s=0.02)["busy"])

    def per_trial_ms(runs: list[dict[str, float]], key: str) -> str:
        values = sorted(1e3 * run[key] / said.trials for run in runs)
        return f"{statistics.median(values):.1f} ({values[0]:.1f} to {values[-1]:.1f})"

    ratio = statistics.median(r["searched_s"] for r in tune) / statistics.median(r["searched_s"] for r in ours)
    whole = statistics.median(r["wall_s"] for r in tune) / statistics.median(r["wall_s"] for r in ours)
    versions = ", ".join(f"{name} {version(name)}" for name in ("ray", "optuna", "mlflow"))
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, {versions}")
    print(f"{said.trials} trials of nothing, {said.at_once} at once; median (least to most) of {said.repeats} runs\n")
    print("| ms a trial | sweeper | Ray Tune | Tune / sweeper |")
    print("|---|---:|---:|---:|")
    print(f"| searching | {per_trial_ms(ours, 'searched_s')} | {per_trial_ms(tune, 'searched_s')} | {ratio:.1f} |")
    print(f"| whole process | {per_trial_ms(ours, 'wall_s')} | {per_trial_ms(tune, 'wall_s')} | {whole:.1f} |")
    shares = sorted(100 * share for share in busy)
    print(f"\n20 ms trials, one at a time: the worker is busy {statistics.median(shares):.1f}% of the time")
    print(f"({shares[0]:.1f} to {shares[-1]:.1f}% over {said.repeats} runs)")


if __name__ == "__main__":
    main()
