"""Compare torchtitan with this project's trainer: the same model, layout, batch and GPUs, in turns, in one run.

    python benchmarks/trainers.py [--sequences 4] [--rounds 2] [--dir DIRECTORY]

Llama 3 8B. Each layout is a sweep of one trial of `workload=torchtitan` (it needs torchtitan 0.2.2) and one of
`workload=parallel`, compiled, everything in bf16, at 8192 tokens a sequence and `--sequences` sequences a step on each
GPU. torchtitan reads text, here random words through a tokenizer of these words; `workload=parallel` takes synthetic
tokens.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import pandas as pd
import torch

LENGTH, WARMUP, STEPS = 8192, 3, 6


class LayoutRow(NamedTuple):
    """A layout that both trainers run, without checkpointing."""

    gpus: int
    micro_batch: int
    tp: int


LAYOUTS = [LayoutRow(1, 1, 1), LayoutRow(1, 2, 1), LayoutRow(2, 2, 1), LayoutRow(2, 2, 2), LayoutRow(2, 1, 1)]


def make_text(folder: Path, words: int = 2000, documents: int = 2000) -> None:
    """Write a tokenizer of whole words, and documents of random words."""
    generator = random.Random(0)
    names = [f"word{number}" for number in range(words)]
    vocabulary = {name: number for number, name in enumerate(["[UNK]", "<begin>", "<end>", *names])}
    assets, texts = folder / "assets", folder / "text"
    assets.mkdir(parents=True)
    texts.mkdir()
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "[UNK]"}
    pre_tokenizer = {"type": "WhitespaceSplit"}
    tokenizer = {"version": "1.0", "pre_tokenizer": pre_tokenizer, "model": model}
    (assets / "tokenizer.json").write_text(json.dumps(tokenizer))
    special_tokens = {"bos_token": "<begin>", "eos_token": "<end>"}
    (assets / "tokenizer_config.json").write_text(json.dumps(special_tokens))
    with (texts / "data.json").open("w") as file:
        for _ in range(documents):
            file.write(json.dumps({"text": " ".join(generator.choices(names, k=1000))}) + "\n")


def measure_tokens_per_s(workload: str, gpus: int, folder: Path, *overrides: str) -> float:
    """Run a sweep of one trial. Returns its tokens/s per GPU; NaN where it did not fit into memory."""
    command = [sys.executable, "-m", "sweeper", f"workload={workload}", f"gpus={gpus}", "search=grid", "finals.top=0"]
    done = subprocess.run([*command, f"dir={folder}", "progress=never", *overrides], capture_output=True, text=True)
    if done.returncode not in (0, 1):
        sys.exit(f"{workload} ended with exit code {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    (path,) = folder.glob("sweeps/*/trials.csv")
    trial = pd.read_csv(path).iloc[0]
    if trial["outcome"] not in ("complete", "infeasible"):
        sys.exit(f"{workload}: {trial['reason']}")
    return float(trial.get("tokens_per_s", math.nan)) / gpus


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=4, help="sequences a step, on each GPU")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--dir", type=Path, help="where the sweeps are stored (default: a new folder)")
    args = parser.parse_args()
    gpus, folder = torch.cuda.device_count(), args.dir or Path(tempfile.mkdtemp())
    make_text(folder)
    text = [f"space.assets={folder}/assets", f"space.dataset_path={folder}/text"]
    print(f"# Llama 3 8B on {gpus} x {torch.cuda.get_device_name()}, torch {torch.__version__}, bf16, compiled")
    print(f"# {LENGTH} tokens a sequence, {args.sequences} sequences a step and GPU; {STEPS} steps after {WARMUP}")
    print(f"\n{'tokens/s per GPU':40} {'torchtitan':>12} {'parallel':>12} {'ratio':>7}")
    for number, layout in enumerate(LAYOUTS):
        if layout.gpus != gpus:
            continue
        both = [f"space.sequence_length={LENGTH}", f"space.global_batch={args.sequences * gpus}", "space.pp=1"]
        both += ["space.cp=1", f"space.tp={layout.tp}", f"space.micro_batch={layout.micro_batch}"]
        both += ["space.checkpointing=none"]
        parallel = [f"space.dp_shard={gpus // layout.tp}", "space.dp_replicate=1", "space.stages_per_rank=1"]
        parallel += ["space.schedule=1f1b", "space.reshard_after_forward=true", "space.model=llama3_8b"]
        parallel += [f"space.warmup={WARMUP}", f"space.steps={STEPS}"]
        torchtitan = [*text, f"command.warmup={WARMUP}", f"command.steps={STEPS}"]
        for turn in range(args.rounds):
            turn_folder = folder / f"{number}_{turn}"
            torchtitan_rate = measure_tokens_per_s("torchtitan", gpus, turn_folder / "torchtitan", *both, *torchtitan)
            parallel_rate = measure_tokens_per_s("parallel", gpus, turn_folder / "parallel", *both, *parallel)
            ratio = parallel_rate / torchtitan_rate
            name = f"tp {layout.tp}, micro-batch {layout.micro_batch}"
            print(f"{name:40} {torchtitan_rate:12,.0f} {parallel_rate:12,.0f} {ratio:7.3f}", flush=True)


if __name__ == "__main__":
    main()
