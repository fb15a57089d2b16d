"""Measure the speed of mixtures of experts against the imbalance of their routing, on one GPU.

    python benchmarks/experts.py [--models olmoe_1b_7b,qwen3_30b_a3b:8] [--rounds 2] [--out results/experts.csv]

A model's name may be followed by the number of first blocks to train. Each round trains every model with every routing
for a few steps, interleaved, so that GPU drift affects all of them. The routings are forced balance, loads by Zipf's
law, and natural routing on synthetic tokens and on this repository's own text, one token per byte.
"""

import argparse
import csv
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.fp8_text import read_text
from workloads.api.contract import Measurement, Rank
from workloads.api.trial import run_trial

COLUMNS = ("round", "model", "layers", "routing", "executed_imbalance", "worst_imbalance", "tokens_per_s", "tflops")
WORK = {"sequence_length": 4096, "global_batch": 8, "micro_batch": 2, "state": "bf16", "warmup": 3, "steps": 6}


def train(device: str, name: str, work: dict[str, Any], **routing: Any) -> Measurement:
    model, _, layers = name.partition(":")
    parameters = {**WORK, "checkpointing": "selective", "model": model, "layers": int(layers) if layers else None}
    return run_trial("parallel", {**parameters, **work, **routing}, Rank(device=device))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="olmoe_1b_7b,qwen3_30b_a3b:8")
    parser.add_argument("--imbalances", default="1,2,4,8")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "experts.csv")
    parser.add_argument("work", nargs="*", help="other parameters, such as micro_batch=4")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    work = {key: int(value) if value.isdigit() else value for key, value in (item.split("=") for item in args.work)}
    work |= {} if device == "cuda" else {"dtype": "fp32", "state": "fp32", "compile": False}
    with tempfile.TemporaryDirectory() as folder, args.out.open("w", newline="") as file:
        text = Path(folder) / "text.txt"
        text.write_bytes(read_text())
        routings: dict[str, dict[str, Any]] = {
            f"forced {n}": {"imbalance": float(n)} for n in args.imbalances.split(",")
        }
        routings |= {"natural, synthetic tokens": {}, "natural, text": {"data": str(text)}}
        table = csv.DictWriter(file, COLUMNS)
        table.writeheader()
        for number in range(args.rounds):
            for name in args.models.split(","):
                for routing, choice in routings.items():
                    measured = train(device, name, work, **choice)
                    step_s = statistics.median(measured.step_times_s)
                    row = {
                        "round": number,
                        "model": name.partition(":")[0],
                        "layers": name.partition(":")[2] or "all",
                        "routing": routing,
                        "executed_imbalance": round(measured.metrics["executed_imbalance"], 3),
                        "worst_imbalance": round(measured.metrics["worst_imbalance"], 3),
                        "tokens_per_s": round(measured.tokens_per_step / step_s, 1),
                        "tflops": round(measured.flops_per_step / step_s / 1e12, 3),
                    }
                    table.writerow(row)
                    file.flush()
                    print(*row.values(), f"loss {measured.metrics['first_loss']:.3f} to {measured.metrics['loss']:.3f}")


if __name__ == "__main__":
    main()
