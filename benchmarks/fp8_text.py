"""Train a model on text in fp8 and in bf16, step by step in turns, and compare losses and gradients.

    python benchmarks/fp8_text.py [--model llama3_1b] [--steps 300] [--length 2048] [--sequences 4] [--device cuda]
    python benchmarks/fp8_text.py --sequences 16 --runs fp8_tensorwise,fp8_blockwise

The text is this repository's own: its Python, Markdown and YAML files, in the order of their names, one token per byte,
in sequences that are drawn in a random order. All runs start from the same random weights and see the same batches,
with AdamW and fp32 master weights: bf16, and by default bf16 with each batch in twice as many chunks, so that numbers
round in another order, and fp8 by each recipe. The second run shows how far rounding alone drives two runs apart.
Before the first step and after the last one, with the weights of the bf16 run, the gradients of the recipes are
compared with those of bf16 by layer and matrix. Losses go into `results/fp8_text_losses.csv`.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import math
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

sys.path.insert(0, str(Path(__file__).parents[1]))
from workloads.llama.fp8_block import FP8_RECIPES
from workloads.llama.shapes import MODELS
from workloads.offload.device_rates import select_attention_kernel
from workloads.offload.engine import Engine
from workloads.offload.kernel_cache import keep_compiled_kernels
from workloads.offload.memory import Arena
from workloads.offload.optimizer import AdamW, Precision
from workloads.offload.plan import LayerPlan, Plan

ROOT = Path(__file__).parents[1]
FOLDERS = ("benchmarks", "conf", "docs", "sweeper", "tests", "workloads")
SUFFIXES = (".py", ".md", ".yaml")
OTHER_CHUNKS = "bf16 in other chunks"
Cosines = dict[str, list[float]]


def read_text() -> bytes:
    """Return the repository's own text."""
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES]
    return b"\n".join(path.read_bytes() for path in sorted([*files, *ROOT.glob("*.md")]))


def draw_batches(text: bytes, steps: int, sequences: int, length: int) -> Iterator[Tensor]:
    """Yield [sequences, length + 1] for each step: all of the text in a random order, then in another one."""
    ids = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    windows = ids[: len(ids) // (length + 1) * (length + 1)].view(-1, length + 1)
    generator = torch.Generator().manual_seed(0)
    rounds = -(-steps * sequences // len(windows))
    order = torch.cat([torch.randperm(len(windows), generator=generator) for _ in range(rounds)])
    yield from (windows[part] for part in order[: steps * sequences].view(steps, sequences))


def build_engine(args: argparse.Namespace, device: torch.device, arena: Arena, recipe: str, chunks: int) -> Engine:
    """Return an engine with everything on the device and one round a step."""
    shape = MODELS[args.model]
    plan = Plan(
        tuple(LayerPlan() for _ in range(shape.layers)), "device", args.length, args.sequences // chunks, chunks, 1
    )
    kernel = select_attention_kernel(shape, args.length, device, torch.bfloat16)
    precision = Precision(torch.bfloat16, master_weights=True, recipe=recipe)
    engine = Engine(
        shape, plan, arena, device, kernel, precision=precision, optimizer=AdamW(learning_rate=args.learning_rate)
    )
    engine.initialize(0)
    return engine


def take_step(engine: Engine, batch: Tensor) -> float:
    plan = engine.plan
    return float(engine.step(batch.view(1, plan.groups_per_round, plan.sequences_per_chunk, -1)))


def compare_gradients(expected: Engine, actual: Engine) -> Cosines:
    """Return the cosine similarity of the last step's gradients by matrix, from the first layer to the last.

    With one round a step, the gradients of a block stay in their buffers until the next step.
    """
    cosines: Cosines = defaultdict(list)
    for n in range(len(expected.plan.layers)):
        tensors = actual._gradients.get(n).tensors
        for name, gradient in expected._gradients.get(n).tensors.items():
            pair = (gradient.float().flatten(), tensors[name].float().flatten())
            cosines[name].append(float(cosine_similarity(*pair, dim=0)))
    return cosines


def print_cosines(title: str, engines: dict[str, Engine], recipes: list[str]) -> None:
    for recipe in recipes:
        print(f"\n{title}: cosines of the gradients in {recipe} with those in bf16, from the first layer on:")
        for name, values in compare_gradients(engines["bf16"], engines[recipe]).items():
            print(f"  {name}: {' '.join(f'{value:.4f}' for value in values)}; lowest {min(values):.4f}")


def print_difference(name: str, losses: dict[str, list[float]], last: int) -> None:
    """Print how far a run's losses are from those of bf16, step by step."""
    differences = [loss - other for loss, other in zip(losses[name], losses["bf16"], strict=True)]
    tail = differences[-last:]
    error = statistics.stdev(tail) / math.sqrt(len(tail)) if len(tail) > 1 else math.nan
    print(
        f"{name} - bf16: over the last {len(tail)} steps mean {statistics.fmean(tail):+.5f} (standard error "
        f"{error:.5f}, not corrected for correlated steps), from {min(tail):+.5f} to {max(tail):+.5f}; over all steps "
        f"mean {statistics.fmean(differences):+.5f}, largest magnitude {max(map(abs, differences)):.5f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama3_1b", choices=MODELS)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--runs", default=",".join((OTHER_CHUNKS, *FP8_RECIPES)), help="beside bf16")
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "fp8_text_losses.csv")
    args = parser.parse_args()
    keep_compiled_kernels()
    device, text = torch.device(args.device), read_text()
    tokens = args.steps * args.sequences * args.length
    print(
        f"{args.model}, {args.steps} steps of {args.sequences} x {args.length} tokens: {tokens / len(text):.2f} times "
        f"{len(text):,} bytes of text, SHA-256 {hashlib.sha256(text).hexdigest()[:16]}"
    )
    runs = ["bf16", *args.runs.split(",")]
    recipes = [name for name in runs if name in FP8_RECIPES]
    with Arena(0, device) as arena, args.out.open("w", newline="", buffering=1) as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["step", *runs])
        engines = {
            name: build_engine(args, device, arena, name if name in recipes else "", 1 + (name == OTHER_CHUNKS))
            for name in runs
        }
        losses: dict[str, list[float]] = {name: [] for name in runs}
        times_s = dict.fromkeys(runs, 0.0)
        for step, batch in enumerate(draw_batches(text, args.steps, args.sequences, args.length)):
            for name, engine in engines.items():
                started = time.perf_counter()
                losses[name].append(take_step(engine, batch))
                times_s[name] += time.perf_counter() - started
            writer.writerow([step + 1, *(f"{values[-1]:.5f}" for values in losses.values())])
            if step == 0:
                print_cosines("First step", engines, recipes)
            if (step + 1) % max(1, args.steps // 10) == 0:
                print(
                    f"step {step + 1}: {', '.join(f'{name} {values[-1]:.4f}' for name, values in losses.items())}",
                    flush=True,
                )
        trained = engines["bf16"].copy_weights()
        for name in ("bf16", *recipes):
            engines[name].load(trained.__getitem__)
            take_step(engines[name], batch)
        print_cosines(f"After {args.steps} steps, with the weights of bf16", engines, recipes)
    print()
    for name in runs[1:]:
        print_difference(name, losses, max(1, args.steps // 3))
    print("tokens/s, first step and its compilation included:", {n: round(tokens / s) for n, s in times_s.items()})


if __name__ == "__main__":
    main()
