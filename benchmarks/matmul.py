"""Measure GEMMs on one GPU: compare this search with two published finders, and samplers, formats and backends.

    python benchmarks/matmul.py [--seeds 5] [--trials 200] [--into DIRECTORY]

Every value comes from a `python -m sweeper` sweep in its own directory. Options reproduce the methods of the two
published finders: gpu_benchmark takes the fastest of 100 warm repeats after 50 warm-up calls, over random shapes;
ml-engineering's finder takes the mean of 100 cold repeats after 30 s of load. On an H200 with torch 2.11 the finders'
own programs gave 818 TFLOP/s (200 trials, 33 s) and 754 TFLOP/s (39 shapes).
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

REPOSITORY = Path(__file__).resolve().parent.parent
WARM = ["space.statistic=fastest_warm", "space.warmup=50", "space.repeats=100"]
COLD = ["space.statistic=mean_cold", "space.warmup_s=30", "space.warmup=3", "space.repeats=100"]
NO_FINALS = ["finals.top=0"]


@dataclass(frozen=True)
class FinishedSweep:
    """The trials of a finished sweep including finals, with the sweep's output and duration."""

    trials: pd.DataFrame
    output: str
    wall_s: float

    @property
    def search(self) -> pd.DataFrame:
        """The complete trials without the finals."""
        trials = self.trials[self.trials.outcome == "complete"]
        return trials[trials["round"].isna()] if "round" in trials else trials

    @property
    def best_tflops(self) -> float:
        return float(self.search.tflops.max())


def run_sweep(directory: Path, name: str, *overrides: str) -> FinishedSweep:
    """Run a sweep in the directory and read its trials. Exits if there are no trials."""
    command = [sys.executable, "-m", "sweeper", "progress=never", f"name={name}", *overrides]
    started = time.monotonic()
    process = subprocess.run(command, cwd=directory, capture_output=True, text=True, env=_environment())
    if process.returncode not in (0, 1) or not (directory / "sweeps" / name / "trials.csv").exists():
        sys.exit(f"{' '.join(command)}\n{process.stderr[-3000:]}")
    trials = pd.read_csv(directory / "sweeps" / name / "trials.csv")
    return FinishedSweep(trials, process.stdout, time.monotonic() - started)


def _environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": path}


def compare_with_finders(directory: Path, trials: int) -> None:
    """Print the best rates of this search and of random search, with the statistic of each published finder."""
    print("\n## Compared with the published finders' methods (TFLOP/s, bf16)\n")
    print("| search | statistic | trials | best | seconds of the process |\n|---|---|---:|---:|---:|")
    cases = [
        ("gpu_benchmark's method: random", ["search=random", "search.initial_points=[]", *WARM, *NO_FINALS], trials),
        ("this search", [*WARM, *NO_FINALS], trials),
        ("ml-engineering's method: random", ["search=random", "search.initial_points=[]", *COLD, *NO_FINALS], 39),
        ("this search", [*COLD, *NO_FINALS], 39),
    ]
    for number, (method, overrides, budget) in enumerate(cases):
        sweep = run_sweep(directory, f"finder{number}", *overrides, f"budget.trials={budget}")
        statistic = "fastest of 100, warm" if WARM[0] in overrides else "mean of 100, cold, after 30 s"
        print(f"| {method} | {statistic} | {budget} | {sweep.best_tflops:.1f} | {sweep.wall_s:.0f} |", flush=True)


def run_default_sweep(directory: Path, trials: int) -> None:
    """Print the result of the default sweep, then the sustained rate of its winner."""
    print(f"\n## The default sweep: {trials} trials, median of 30 cold repeats, finals\n\n```")
    sweep = run_sweep(directory, "main", f"budget.trials={trials}")
    print(sweep.output.strip(), f"\n{sweep.wall_s:.0f} s for the process\n```", flush=True)
    finals = sweep.trials[sweep.trials["round"].notna()]
    winner = int(finals.groupby("remeasured_trial").tflops.mean().idxmax())
    shape = sweep.search.set_index("trial").loc[winner]
    overrides = [f"space.{name}={int(shape[f'param.{name}'])}" for name in "mnk"]
    overrides += ["space.sustained_s=3", "search=grid", *NO_FINALS]
    trial = run_sweep(directory, "sustained", *overrides).search.iloc[0]
    print(
        f"\nThe winner's sustained rate: {trial.tflops_sustained:.1f} TFLOP/s at "
        f"{trial.sustained_sm_clock_mhz:.0f} MHz ({trial.sustained_power_w:.0f} W); its burst just before: "
        f"{trial.tflops:.1f} TFLOP/s at {trial.sm_clock_mhz:.0f} MHz.",
        flush=True,
    )


def compare_samplers(directory: Path, seeds: int, trials: int) -> None:
    """Print the best rates of TPE and random search for each seed, and their median ratio."""
    print(f"\n## TPE against random search, {trials} trials each, {seeds} seeds (best TFLOP/s, median of 30 cold)\n")
    print("| seed | tpe | random |\n|---:|---:|---:|")
    ratios = []
    for seed in range(1, seeds + 1):
        # The samplers alternate, each first for half of the seeds, so that GPU heat affects both equally.
        order = ["tpe", "random"] if seed % 2 else ["random", "tpe"]
        overrides = [f"seed={seed}", f"budget.trials={trials}", "search.initial_points=[]", *NO_FINALS]
        best_tflops = {
            sampler: run_sweep(directory, f"{sampler}{seed}", f"search={sampler}", *overrides).best_tflops
            for sampler in order
        }
        print(f"| {seed} | {best_tflops['tpe']:.1f} | {best_tflops['random']:.1f} |", flush=True)
        ratios.append(best_tflops["tpe"] / best_tflops["random"])
    wins = sum(ratio > 1 for ratio in ratios)
    print(f"\nTPE over random: median ratio {statistics.median(ratios):.4f}, better in {wins} of {seeds}.", flush=True)


def compare_formats(directory: Path) -> None:
    """Print the rates of all formats, then of all layouts, output types and accumulations in bf16."""
    print("\n## Formats, 8192 x 8192 x 8192\n\n```")
    overrides = ["space.m=8192", "space.n=8192", "space.k=8192", "search=grid", "budget.trials=1000", *NO_FINALS]
    dtypes = "fp32,tf32,fp16,bf16,fp8_tensorwise,fp8_rowwise,fp8_blockwise,mxfp8,mxfp4,nvfp4"
    print(run_sweep(directory, "formats", *overrides, f"space.dtype={dtypes}").output.strip(), "\n```", flush=True)
    print("\n## Layouts, output types and accumulation, bf16\n\n```")
    choices = ["space.layout=nn,nt,tn,tt", "space.output_dtype=bf16,fp32", "space.accumulation=reduced,fp32"]
    print(run_sweep(directory, "layouts", *overrides, *choices).output.strip(), "\n```", flush=True)


def compare_backends(directory: Path) -> None:
    """Print the rates of all backends for four shapes."""
    print("\n## Backends: does another one beat torch.mm? (bf16)\n\n```")
    shapes = ["space.m=4096,8192", "space.n=8192", "space.k=4096,8192"]
    backends = "torch,cublas,cublaslt,ck,tunable,triton"  # backends of other vendors are left out
    overrides = [*shapes, "search=grid", "budget.trials=1000", *NO_FINALS]
    print(run_sweep(directory, "backends", *overrides, f"space.backend={backends}").output.strip(), "\n```", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--into", type=Path, default=Path("benchmark_matmul"))
    args = parser.parse_args()
    args.into.mkdir(parents=True, exist_ok=True)
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    print(f"# Matrix products: {gpu}, torch {torch.__version__}, Python {sys.version.split()[0]}")
    compare_with_finders(args.into, args.trials)
    run_default_sweep(args.into, args.trials)
    compare_samplers(args.into, args.seeds, args.trials // 4)
    compare_formats(args.into)
    compare_backends(args.into)


if __name__ == "__main__":
    main()
