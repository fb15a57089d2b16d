"""torchtitan beside this project's own trainer: the same model, layout, batch and GPUs, in turns, in one run.

    python benchmarks/trainers.py [--sequences 4] [--rounds 2] [--dir DIRECTORY]

Llama 3 8B. Each layout is a sweep of one trial of `workload=torchtitan` (torchtitan 0.2.2, to be installed) and one of
`workload=parallel`, compiled, everything in bf16, at 8192 tokens a sequence and so many sequences a step on each GPU.
torchtitan reads text, here made-up words through a tokenizer made for them; ours takes made-up tokens.
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

import pandas as pd
import torch

LENGTH, WARMUP, STEPS = 8192, 3, 6
# What both trainers are told: on how many GPUs, micro-batch, tensor parallel degree, what is computed again.
LAYOUTS = [(1, 1, 1, "none"), (1, 2, 1, "none"), (2, 2, 1, "none"), (2, 2, 2, "none"), (2, 1, 1, "none")]


def make_text(folder: Path, words: int = 2000, documents: int = 2000) -> None:
    """A tokenizer of whole words, and documents of them drawn at random."""
    chance = random.Random(0)
    names = [f"word{number}" for number in range(words)]
    vocabulary = {name: number for number, name in enumerate(["[UNK]", "<begin>", "<end>", *names])}
    assets, texts = folder / "assets", folder / "text"
    assets.mkdir(parents=True)
    texts.mkdir()
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "[UNK]"}
    apart = {"type": "WhitespaceSplit"}
    (assets / "tokenizer.json").write_text(json.dumps({"version": "1.0", "pre_tokenizer": apart, "model": model}))
    ends = {"bos_token": "<begin>", "eos_token": "<end>"}
    (assets / "tokenizer_config.json").write_text(json.dumps(ends))
    with (texts / "data.json").open("w") as file:
        for _ in range(documents):
            file.write(json.dumps({"text": " ".join(chance.choices(names, k=1000))}) + "\n")


def tokens_per_s(workload: str, gpus: int, folder: Path, *words: str) -> float:
    """Of the one trial of a sweep, on each GPU; not a number where it did not fit."""
    command = [sys.executable, "-m", "sweeper", f"workload={workload}", f"gpus={gpus}", "search=grid", "finals.top=0"]
    done = subprocess.run([*command, f"dir={folder}", "progress=never", *words], capture_output=True, text=True)
    if done.returncode not in (0, 1):
        sys.exit(f"{workload} ended with exit code {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    (found,) = folder.glob("sweeps/*/trials.csv")
    trial = pd.read_csv(found).iloc[0]
    if trial["outcome"] not in ("complete", "infeasible"):
        sys.exit(f"{workload}: {trial['reason']}")
    return float(trial.get("tokens_per_s", math.nan)) / gpus


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=4, help="a step, on each GPU")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--dir", type=Path, help="where the sweeps are kept (default: a new folder)")
    said = parser.parse_args()
    gpus, folder = torch.cuda.device_count(), said.dir or Path(tempfile.mkdtemp())
    make_text(folder)
    text = [f"space.assets={folder}/assets", f"space.dataset_path={folder}/text"]
    print(f"# Llama 3 8B on {gpus} x {torch.cuda.get_device_name()}, torch {torch.__version__}, bf16, compiled")
    print(f"# {LENGTH} tokens a sequence, {said.sequences} sequences a step and GPU; {STEPS} steps after {WARMUP}")
    print(f"\n{'tokens/s per GPU':40} {'torchtitan':>12} {'parallel':>12} {'ratio':>7}")
    for number, (count, micro, tensor, checkpointing) in enumerate(LAYOUTS):
        if count != gpus:
            continue
        both = [f"space.sequence_length={LENGTH}", f"space.global_batch={said.sequences * count}"]
        both += [f"space.micro_batch={micro}", f"space.tensor={tensor}", "space.pipeline=1", "space.context=1"]
        both += [f"space.checkpointing={checkpointing}"]
        ours = [f"space.shard={count // tensor}", "space.replicate=1", "space.stages=1", "space.schedule=1f1b"]
        ours += ["space.reshard=true", f"space.warmup={WARMUP}", f"space.steps={STEPS}", "space.model=llama3_8b"]
        theirs = [*text, f"command.warmup={WARMUP}", f"command.steps={STEPS}"]
        for turn in range(said.rounds):
            place = folder / f"{number}_{turn}"
            titan = tokens_per_s("torchtitan", count, place / "torchtitan", *both, *theirs)
            own = tokens_per_s("parallel", count, place / "parallel", *both, *ours)
            what = f"tensor {tensor}, micro-batch {micro}, checkpointing {checkpointing}"
            print(f"{what:40} {titan:12,.0f} {own:12,.0f} {own / titan:7.3f}", flush=True)


if __name__ == "__main__":
    main()
