"""Matrix products on one GPU: this search beside the methods of two published finders, samplers, formats and routes.

    python benchmarks/matmul.py [--seeds 5] [--trials 200] [--into DIRECTORY]

Every figure comes from a sweep of `python -m sweeper` in a directory of its own. The two published finders' methods
are options here: gpu_benchmark takes the fastest of 100 warm repeats after 50, over random shapes; ml-engineering's
takes the mean of 100 cold ones after 30 s of load. On an H200 with torch 2.11 they themselves gave 818 TFLOP/s (200
trials, 33 s) and 754 (39 shapes).
"""

from __future__ import annotations

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
class Done:
    """A finished sweep: its trials, the search's and the finals', its closing words and how long it took."""

    trials: pd.DataFrame
    words: str
    wall_s: float

    @property
    def search(self) -> pd.DataFrame:
        trials = self.trials[self.trials.outcome == "complete"]
        return trials[trials["round"].isna()] if "round" in trials else trials

    @property
    def best(self) -> float:
        return float(self.search.tflops.max())


def sweep(into: Path, name: str, *words: str) -> Done:
    command = [sys.executable, "-m", "sweeper", "progress=never", f"name={name}", *words]
    started = time.monotonic()
    done = subprocess.run(command, cwd=into, capture_output=True, text=True, env=_environment())
    if done.returncode not in (0, 1) or not (into / "sweeps" / name / "trials.csv").exists():
        sys.exit(f"{' '.join(command)}\n{done.stderr[-3000:]}")
    trials = pd.read_csv(into / "sweeps" / name / "trials.csv")
    return Done(trials, done.stdout, time.monotonic() - started)


def _environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": path}


def compare_with_finders(into: Path, trials: int) -> None:
    print("\n## Against the published finders' methods (TFLOP/s, bf16)\n")
    print("| search | statistic | trials | best | seconds of the process |\n|---|---|---:|---:|---:|")
    cases = [
        ("gpu_benchmark's method: random", ["search=random", "first=[]", *WARM, *NO_FINALS], trials),
        ("this search", [*WARM, *NO_FINALS], trials),
        ("ml-engineering's method: random", ["search=random", "first=[]", *COLD, *NO_FINALS], 39),
        ("this search", [*COLD, *NO_FINALS], 39),
    ]
    for number, (who, words, budget) in enumerate(cases):
        done = sweep(into, f"finder{number}", *words, f"budget.trials={budget}")
        statistic = "fastest of 100, warm" if WARM[0] in words else "mean of 100, cold, after 30 s"
        print(f"| {who} | {statistic} | {budget} | {done.best:.1f} | {done.wall_s:.0f} |", flush=True)


def main_job(into: Path, trials: int) -> None:
    print(f"\n## The main job: {trials} trials, median of 30 cold repeats, finals\n\n```")
    done = sweep(into, "main", f"budget.trials={trials}")
    print(done.words.strip(), f"\n{done.wall_s:.0f} s for the process\n```", flush=True)
    finals = done.trials[done.trials["round"].notna()]
    winner = int(finals.groupby("again_of").tflops.mean().idxmax())
    shape = done.search.set_index("trial").loc[winner]
    words = [f"space.{name}={int(shape[f'param.{name}'])}" for name in "mnk"]
    held = sweep(into, "sustained", *words, "space.sustained_s=3", "search=grid", *NO_FINALS).search.iloc[0]
    print(
        f"\nThe winner sustained: {held.tflops_sustained:.1f} TFLOP/s at {held.sustained_sm_clock_mhz:.0f} MHz "
        f"({held.sustained_power_w:.0f} W), where its burst just before was {held.tflops:.1f} at "
        f"{held.sm_clock_mhz:.0f} MHz.",
        flush=True,
    )


def compare_samplers(into: Path, seeds: int, trials: int) -> None:
    print(f"\n## TPE against random search, {trials} trials each, {seeds} seeds (best TFLOP/s, median of 30 cold)\n")
    print("| seed | tpe | random |\n|---:|---:|---:|")
    ratios = []
    for seed in range(1, seeds + 1):
        # In turns, and each first half of the time: what the GPU's heat does, it does to both.
        order = ["tpe", "random"] if seed % 2 else ["random", "tpe"]
        words = [f"seed={seed}", f"budget.trials={trials}", "first=[]", *NO_FINALS]
        best = {name: sweep(into, f"{name}{seed}", f"search={name}", *words).best for name in order}
        print(f"| {seed} | {best['tpe']:.1f} | {best['random']:.1f} |", flush=True)
        ratios.append(best["tpe"] / best["random"])
    wins = sum(ratio > 1 for ratio in ratios)
    print(f"\nTPE over random: median ratio {statistics.median(ratios):.4f}, better in {wins} of {seeds}.", flush=True)


def formats(into: Path) -> None:
    print("\n## Formats, 8192 x 8192 x 8192\n\n```")
    words = ["space.m=8192", "space.n=8192", "space.k=8192", "search=grid", "budget.trials=1000", *NO_FINALS]
    every = "fp32,tf32,fp16,bf16,fp8_tensorwise,fp8_rowwise,fp8_blockwise,mxfp8,mxfp4,nvfp4"
    print(sweep(into, "formats", *words, f"space.dtype={every}").words.strip(), "\n```", flush=True)
    print("\n## Layouts, output types and accumulation, bf16\n\n```")
    choices = ["space.layout=nn,nt,tn,tt", "space.output_dtype=bf16,fp32", "space.accumulation=reduced,fp32"]
    print(sweep(into, "layouts", *words, *choices).words.strip(), "\n```", flush=True)


def routes(into: Path) -> None:
    print("\n## Routes: does another one beat torch.mm? (bf16)\n\n```")
    shapes = ["space.m=4096,8192", "space.n=8192", "space.k=4096,8192"]
    every = "torch,cublas,cublaslt,triton,tinygrad"
    words = [*shapes, "search=grid", "budget.trials=1000", *NO_FINALS]
    print(sweep(into, "routes", *words, f"space.route={every}").words.strip(), "\n```", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--into", type=Path, default=Path("benchmark_matmul"))
    said = parser.parse_args()
    said.into.mkdir(parents=True, exist_ok=True)
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    print(f"# Matrix products: {gpu}, torch {torch.__version__}, Python {sys.version.split()[0]}")
    compare_with_finders(said.into, said.trials)
    main_job(said.into, said.trials)
    compare_samplers(said.into, said.seeds, said.trials // 4)
    formats(said.into)
    routes(said.into)


if __name__ == "__main__":
    main()
