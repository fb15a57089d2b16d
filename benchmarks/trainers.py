"""Compare torchtitan with this project's trainer: the same model, layout, batch and GPUs, interleaved, in one run.

    python benchmarks/trainers.py [--model llama3_8b] [--sequences 4] [--rounds 2] [--plan] [--dir DIRECTORY]

Each of eight layouts on two GPUs is a sweep of one trial of `workload=torchtitan` (it needs torchtitan 0.2.2) and one
of `workload=parallel`, compiled, at 8192 tokens a sequence and `--sequences` sequences a step on each GPU, over 20
steps after 3 of warm-up. Weights, gradients and optimizer states are in fp32, products in bf16; where nothing is
sharded (tensor or pipeline parallelism alone) torchtitan 0.2.2 has no mixed precision, and both train in bf16.

It prints tokens/s, memory and losses of both, and then what has to hold: the same order for each pair of layouts that
differ by more than 3%, and ratios within 5%. torchtitan reads text, here random words through a tokenizer of these
words, with the probabilities of the synthetic tokens of `workload=parallel`, and both train at the same constant
learning rate. Their first weights differ (torchtitan's embedding has a standard deviation of 1, here it is 0.02), so
losses are compared among the layouts of one trainer, and printed side by side. `--plan` prints the command lines and
configurations, and runs nothing.
"""

import argparse
import itertools
import json
import math
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from workloads.models.model import MODELS
from workloads.parallel.train import TokenSource

LENGTH, WARMUP, STEPS, GPUS = 8192, 3, 20, 2
LEARNING_RATE = 1e-4
FLAVORS = {"llama3_8b": "8B"}  # of torchtitan 0.2.2's llama3, by this project's names
ORDER_MARGIN, RATE_MARGIN, MEMORY_MARGIN, LOSS_MARGIN = 0.03, 0.05, 0.05, 0.02
PRESET = Path(__file__).parents[1] / "conf/workload/torchtitan.yaml"


@dataclass(frozen=True)
class Row:
    """One layout as both trainers name it.

    Attributes:
        parallel: parameters of `workload=parallel` beside the defaults of `FIXED`.
        torchtitan: values of its configuration, by section and name.
        is_mixed: state in fp32 and products in bf16; otherwise all in bf16.
    """

    name: str
    parallel: dict[str, Any]
    torchtitan: dict[str, Any] = field(default_factory=dict)
    is_mixed: bool = True


FIXED = {"dp_replicate": 1, "dp_shard": 1, "tp": 1, "cp": 1, "pp": 1, "stages_per_rank": 1, "schedule": "1f1b"}
FIXED |= {"micro_batch": 1, "checkpointing": "none", "reshard_after_forward": "true", "block": "pytorch"}
ROWS = [
    Row("dp_shard 2", {"dp_shard": 2}),
    Row(
        "dp_shard 2, weights stay gathered",
        {"dp_shard": 2, "reshard_after_forward": "false"},
        {"parallelism.fsdp_reshard_after_forward": "never"},
    ),
    # In fp32 the states of 8B take 120 GiB of each GPU. torchtitan's is DDP within autocast.
    Row(
        "dp_replicate 2",
        {"dp_replicate": 2},
        {"parallelism.data_parallel_replicate_degree": 2, "parallelism.data_parallel_shard_degree": 1},
        is_mixed=False,
    ),
    Row("tp 2", {"tp": 2}, {"parallelism.tensor_parallel_degree": 2}, is_mixed=False),
    # torchtitan's local batch is what goes through the pipeline at once, in micro-batches of one.
    Row("pp 2", {"pp": 2}, {"parallelism.pipeline_parallel_degree": 2, "training.local_batch_size": 0}, is_mixed=False),
    Row("cp 2", {"cp": 2}, {"parallelism.context_parallel_degree": 2}),
    # torchtitan's default: every second block, whole.
    Row(
        "dp_shard 2, selective checkpointing",
        {"dp_shard": 2, "checkpointing": "full", "checkpointing_freq": 2},
        {"activation_checkpoint.mode": "selective", "activation_checkpoint.selective_ac_option": "2"},
    ),
    Row(
        "dp_shard 2, full checkpointing",
        {"dp_shard": 2, "checkpointing": "full"},
        {"activation_checkpoint.mode": "full"},
    ),
]


@dataclass(frozen=True)
class Result:
    """What one trial measured: of all GPUs, and of the GPU that needs the most memory."""

    tokens_per_s: float = math.nan
    gib: float = math.nan
    loss: float = math.nan


def make_text(folder: Path, vocabulary: int, documents: int = 60) -> None:
    """Write a tokenizer of whole words, and documents of random words: those of `workload=parallel` by their ids."""
    names = ["[UNK]", "<begin>", "<end>", *(f"word{number}" for number in range(3, vocabulary))]
    assets, texts = folder / "assets", folder / "text"
    assets.mkdir(parents=True)
    texts.mkdir()
    model = {"type": "WordLevel", "vocab": {name: id_ for id_, name in enumerate(names)}, "unk_token": "[UNK]"}
    pre_tokenizer = {"type": "WhitespaceSplit"}
    tokenizer = {"version": "1.0", "pre_tokenizer": pre_tokenizer, "model": model}
    (assets / "tokenizer.json").write_text(json.dumps(tokenizer))
    special_tokens = {"bos_token": "<begin>", "eos_token": "<end>"}
    (assets / "tokenizer_config.json").write_text(json.dumps(special_tokens))
    source, words = TokenSource(vocabulary, LENGTH, seed=0), np.array(names)
    with (texts / "data.json").open("w") as file:
        for step in range(documents):
            ids = source.draw(step, [0]).tokens[0].numpy()
            file.write(json.dumps({"text": " ".join(words[ids])}) + "\n")


def write_workload(path: Path, row: Row, model: str, global_batch: int) -> None:
    """Write the preset of torchtitan with this row's configuration as a workload of its own."""
    preset = yaml.safe_load(PRESET.read_text())
    command, config = preset["command"], preset["command"]["files"]["config.toml"]
    config["model"]["flavor"] = FLAVORS[model]
    values = {
        "training.seq_len": LENGTH,
        "training.local_batch_size": 1,
        "training.global_batch_size": global_batch,
        "training.dtype": "float32" if row.is_mixed else "bfloat16",
        "parallelism.tensor_parallel_degree": 1,
        "parallelism.pipeline_parallel_degree": 1,
        "parallelism.context_parallel_degree": 1,
        "activation_checkpoint.mode": "none",
        "compile.enable": True,
        "optimizer.lr": LEARNING_RATE,
        "lr_scheduler.warmup_steps": 0,
    }
    values |= row.torchtitan
    values["training.local_batch_size"] = values["training.local_batch_size"] or global_batch
    for key, value in values.items():
        section, name = key.split(".")
        config.setdefault(section, {})[name] = value
    command |= {"global_batch": str(global_batch), "sequence_length": str(LENGTH), "model": model, "dtype": "bf16"}
    command |= {"warmup": WARMUP, "steps": STEPS, "options": {}}
    del command["layout"]  # its estimates: every row is measured
    preset["space"] = {name: preset["space"][name] for name in ("assets", "dataset_path")}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"# @package _global_\n{yaml.safe_dump(preset, sort_keys=False)}")


def sweep_command(row: Row, trainer: str, folder: Path, model: str, global_batch: int) -> list[str]:
    """Return the command line of a sweep of one trial."""
    command = [sys.executable, "-m", "sweeper", f"gpus={GPUS}", "search=grid", "finals.top=0", "progress=never"]
    if trainer == "torchtitan":
        write_workload(folder / "conf/workload/torchtitan_row.yaml", row, model, global_batch)
        command += ["--config-dir", str(folder / "conf"), "workload=torchtitan_row"]
        text = folder.parents[1]
        return [*command, f"dir={folder}", f"space.assets={text}/assets", f"space.dataset_path={text}/text"]
    values = FIXED | row.parallel | {"state": "fp32" if row.is_mixed else "bf16", "model": model, "compile": "true"}
    values |= {"sequence_length": LENGTH, "global_batch": global_batch, "warmup": WARMUP, "steps": STEPS}
    values |= {"learning_rate": LEARNING_RATE}
    return [
        *command,
        "workload=parallel",
        f"dir={folder}",
        *(f"space.{name}={value}" for name, value in values.items()),
    ]


def measure(command: list[str], folder: Path) -> Result:
    """Run a sweep of one trial, or read the one in the folder; all values are NaN where the trial failed."""
    if (trial := read_trial(folder)) is None:
        shutil.rmtree(folder / "sweeps", ignore_errors=True)  # of a trial that failed
        done = subprocess.run(command, capture_output=True, text=True)
        if (trial := read_trial(folder)) is None:
            print(f"{folder}: exit code {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-4000:]}", file=sys.stderr)
            return Result()
    # torchtitan prints the memory that its allocator reserved.
    gib = trial.get("peak_reserved_gib", trial.get("peak_device_gib", math.nan))
    return Result(float(trial.get("tokens_per_s", math.nan)), float(gib), float(trial.get("loss", math.nan)))


def read_trial(folder: Path) -> pd.Series | None:
    """Return the trial of a sweep in the folder, None where it failed or there is none."""
    for path in folder.glob("sweeps/*/trials.csv"):
        for _, trial in pd.read_csv(path).iterrows():  # none where the sweep was stopped
            if trial["outcome"] in ("complete", "infeasible"):
                return trial
    return None


def median_result(results: list[Result]) -> Result:
    return Result(*(statistics.median(getattr(result, name) for result in results) for name in vars(Result())))


def describe_order(results: dict[str, tuple[Result, Result]]) -> list[str]:
    """Return a line for each pair that one trainer ranks by more than `ORDER_MARGIN` and the other the other way."""
    lines = []
    for first, second in itertools.combinations(results, 2):
        ratios = [a.tokens_per_s / b.tokens_per_s for a, b in zip(results[first], results[second], strict=True)]
        differs = any(abs(ratio - 1) > ORDER_MARGIN for ratio in ratios)
        if differs and (ratios[0] - 1) * (ratios[1] - 1) < 0:
            lines.append(f"{first} over {second}: torchtitan {ratios[0]:.3f}, workload=parallel {ratios[1]:.3f}")
    return lines


def print_conclusions(results: dict[str, tuple[Result, Result]]) -> None:
    wrong_order = describe_order(results)
    print(f"\npairs in another order, of those that differ by more than {ORDER_MARGIN:.0%}: {len(wrong_order)}")
    print("".join(f"  {line}\n" for line in wrong_order), end="")
    for name, margin in (("tokens_per_s", RATE_MARGIN), ("gib", MEMORY_MARGIN)):
        ratios = {row: getattr(ours, name) / getattr(titan, name) for row, (titan, ours) in results.items()}
        outside = {row: round(ratio, 3) for row, ratio in ratios.items() if not abs(ratio - 1) <= margin}
        print(f"{name}: {len(ratios) - len(outside)} of {len(ratios)} within {margin:.0%}; others: {outside or 'none'}")
    for number, trainer in enumerate(("torchtitan", "workload=parallel")):
        losses = [pair[number].loss for pair in results.values() if not math.isnan(pair[number].loss)]
        spread = max(losses) - min(losses) if losses else math.nan
        print(f"losses of {trainer} after {WARMUP + STEPS} steps: spread {spread:.4f} (margin {LOSS_MARGIN})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama3_8b", choices=FLAVORS)
    parser.add_argument("--sequences", type=int, default=4, help="sequences a step, on each GPU")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--plan", action="store_true", help="print the command lines and configurations only")
    parser.add_argument("--dir", type=Path, help="of the sweeps (default: a new one); a second run goes on")
    args = parser.parse_args()
    folder, global_batch = args.dir or Path(tempfile.mkdtemp()), args.sequences * GPUS
    if not (folder / "text").exists():
        make_text(folder, MODELS[args.model].vocabulary)
    print(f"# {args.model} on {GPUS} GPUs, compiled; {LENGTH} tokens a sequence, {global_batch} sequences a step")
    columns = f"{'tokens/s: titan':>15} {'parallel':>9} {'ratio':>6} {'GiB: titan':>10} {'parallel':>9}"
    print(f"\n{'layout':38} {columns} {'loss: titan':>12} {'parallel':>9}")
    results = {}
    for number, row in enumerate(ROWS):
        turns: dict[str, list[Result]] = {"torchtitan": [], "parallel": []}
        for turn, trainer in itertools.product(range(args.rounds), turns):
            place = folder / f"row{number}_{turn}" / trainer
            command = sweep_command(row, trainer, place, args.model, global_batch)
            if args.plan:
                print(row.name, " ".join(command), sep="\n  ")
                continue
            turns[trainer].append(measure(command, place))
        if args.plan:
            continue
        titan, ours = (median_result(turns[trainer]) for trainer in ("torchtitan", "parallel"))
        results[row.name] = (titan, ours)
        ratio = ours.tokens_per_s / titan.tokens_per_s
        rates = f"{titan.tokens_per_s:15,.0f} {ours.tokens_per_s:9,.0f} {ratio:6.3f}"
        losses = f"{titan.loss:12.4f} {ours.loss:9.4f}"
        print(f"{row.name:38} {rates} {titan.gib:10.1f} {ours.gib:9.1f} {losses}", flush=True)
    if results:
        print_conclusions(results)


if __name__ == "__main__":
    main()
