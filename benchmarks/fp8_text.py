"""Train a model on text in bf16 and then in fp8, or without fp32 master weights, and compare losses and gradients.

    python benchmarks/fp8_text.py [--model llama3_1b] [--steps 300] [--length 2048] [--sequences 4] [--device cuda]
    python benchmarks/fp8_text.py --sequences 16 --runs fp8_tensorwise,fp8_blockwise
    python benchmarks/fp8_text.py --model llama3_8b --saved projections --warmup 20 --runs fp8_tensorwise
    python benchmarks/fp8_text.py --runs nearest,stochastic --out benchmarks/results/rounding_losses.csv
    python benchmarks/fp8_text.py --model olmoe_1b_7b --layers 2 --runs "bf16 in other chunks,fp8_tensorwise"

The text is this repository's own: its Python, Markdown and YAML files, ordered by name, one token per byte, in
sequences drawn in a random order. All runs start from the same random weights and see the same batches, with AdamW and
fp32 master weights. By default, the runs are bf16, bf16 with each batch in twice as many chunks, and fp8 with each
recipe. The second run rounds in a different order and shows how far rounding alone drives two runs apart. `nearest` and
`stochastic` keep only bf16 weights, which AdamW rounds as named, with fp32 moments like the other runs. At the first
step and after the last step, at the bf16 run's weights, each recipe's gradients are compared with the bf16 gradients by
layer and matrix. Each loss is written to `results/fp8_text_losses.csv` at once.
"""

import argparse
import csv
import hashlib
import math
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import get_args

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

sys.path.insert(0, str(Path(__file__).parents[1]))
from workloads.instruments import device as devices
from workloads.instruments import process_setup
from workloads.instruments.process_setup import keep_compiled_kernels
from workloads.llama.fp8_block import FP8_RECIPES
from workloads.models.model import MODELS
from workloads.offload import OffloadModelName
from workloads.offload.device_rates import select_attention_kernel
from workloads.offload.engine import Engine
from workloads.offload.host_memory import Arena
from workloads.offload.optimizer import AdamW, Precision, Rounding
from workloads.offload.plan import SAVED_ACTIVATIONS, ActivationPlan, LayerPlan, Plan

ROOT = Path(__file__).parents[1]
FOLDERS = ("benchmarks", "conf", "docs", "sweeper", "tests", "workloads")
SUFFIXES = (".py", ".md", ".yaml")
OTHER_CHUNKS = "bf16 in other chunks"
Gradients = list[dict[str, Tensor]]  # of each block, by matrix


def read_text() -> bytes:
    """Return the repository's own text."""
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES]
    return b"\n".join(path.read_bytes() for path in sorted([*files, *ROOT.glob("*.md")]))


def draw_batches(text: bytes, steps: int, sequences: int, length: int) -> Iterator[Tensor]:
    """Yield [sequences, length + 1] for each step: the whole text in a random order, then in another order."""
    ids = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    windows = ids[: len(ids) // (length + 1) * (length + 1)].view(-1, length + 1)
    generator = torch.Generator().manual_seed(0)
    rounds = -(-steps * sequences // len(windows))
    order = torch.cat([torch.randperm(len(windows), generator=generator) for _ in range(rounds)])
    yield from (windows[part] for part in order[: steps * sequences].view(steps, sequences))


def build_engine(args: argparse.Namespace, arena: Arena, run: str) -> Engine:
    """Return an engine with everything on the device and one round per step."""
    shape, device = replace(MODELS[args.model], layers=args.layers), torch.device(args.device)
    chunks = 1 + (run == OTHER_CHUNKS)
    layer = LayerPlan(activations=(ActivationPlan(args.saved),))
    plan = Plan(
        (layer,) * shape.layers,
        sequence_length=args.length,
        sequences_per_chunk=args.sequences // chunks,
        chunks_per_round=chunks,
        accumulation_rounds=1,
    )
    kernel = select_attention_kernel(shape, args.length, device, torch.bfloat16)
    precision = Precision(
        torch.bfloat16, run not in get_args(Rounding), run if run in FP8_RECIPES else "", optimizer_states="fp32"
    )
    optimizer = AdamW(learning_rate=args.learning_rate, rounding="stochastic" if run == "stochastic" else "nearest")
    engine = Engine(shape, plan, arena, device, kernel, precision=precision, optimizer=optimizer)
    engine.initialize(0)
    return engine


def take_step(engine: Engine, batch: Tensor) -> float:
    plan = engine.plan
    return float(engine.step(batch.view(1, plan.groups_per_round, plan.sequences_per_chunk, -1)))


def view_gradients(engine: Engine) -> Gradients:
    """Return the last step's gradients. With one round per step, they stay in their buffers until the next step."""
    return [engine._gradients.get(n).tensors for n in range(len(engine.plan.layers))]


def copy_to_host(gradients: Gradients) -> Gradients:
    return [{name: gradient.to("cpu", copy=True) for name, gradient in layer.items()} for layer in gradients]


def print_cosines(title: str, recipe: str, expected: Gradients, actual: Gradients) -> None:
    """Print the cosine similarity of gradients by matrix, from the first layer to the last."""
    cosines: dict[str, list[float]] = defaultdict(list)
    for expected_layer, actual_layer in zip(expected, actual, strict=True):
        for name, gradient in actual_layer.items():
            pair = (gradient.float().flatten(), expected_layer[name].to(gradient.device).float().flatten())
            cosines[name].append(float(cosine_similarity(*pair, dim=0)))
    print(f"\n{title}: cosines of the gradients in {recipe} with those in bf16, from the first layer on:")
    for name, values in cosines.items():
        print(f"  {name}: {' '.join(f'{value:.4f}' for value in values)}; lowest {min(values):.4f}", flush=True)


class Comparison:
    """The losses of the runs so far, and the gradients that recipes are compared with."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.batches = list(draw_batches(read_text(), args.steps, args.sequences, args.length))
        self.losses: dict[str, list[float]] = {}
        self._weights: dict[str, Tensor] = {}
        self._gradients: dict[str, Gradients] = {}

    def train(self, run: str) -> None:
        """Train one run on all batches; the first run is bf16."""
        devices.release_memory(torch.device(self.args.device))
        torch.compiler.reset()
        losses = self.losses[run] = []
        with Arena(0, torch.device(self.args.device)) as arena:
            engine = build_engine(self.args, arena, run)
            for step, batch in enumerate(self.batches):
                rate = self.args.learning_rate * min(1.0, (step + 1) / (self.args.warmup + 1))
                engine.optimizer = replace(engine.optimizer, learning_rate=rate)
                losses.append(take_step(engine, batch))
                self._write_losses()
                if step == 0:
                    started = time.perf_counter()
                    self._compare("First step", run, engine)
                if (step + 1) % max(1, self.args.steps // 10) == 0:
                    print(f"{run}, step {step + 1}: {losses[-1]:.4f}", flush=True)
            tokens = (self.args.steps - 1) * self.batches[0].shape[0] * self.args.length
            print(f"{run}: {tokens / (time.perf_counter() - started):,.0f} tokens/s, comparison included", flush=True)
            if run == "bf16":
                self._weights = dict(engine.copy_weights())
            engine.load(self._weights.__getitem__)
            take_step(engine, self.batches[-1])
            self._compare(f"After {self.args.steps} steps, with the weights of bf16", run, engine)

    def _compare(self, title: str, run: str, engine: Engine) -> None:
        if run == "bf16":
            self._gradients[title] = copy_to_host(view_gradients(engine))
        elif run in FP8_RECIPES:
            print_cosines(title, run, self._gradients[title], view_gradients(engine))

    def _write_losses(self) -> None:
        with self.args.out.open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(["step", *self.losses])
            for step, row in enumerate(zip_longest(*self.losses.values())):
                writer.writerow([step + 1, *("" if loss is None else f"{loss:.5f}" for loss in row)])


def print_difference(name: str, losses: dict[str, list[float]], last: int) -> None:
    """Print how far a run's losses are from the bf16 losses, step by step."""
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
    parser.add_argument("--model", default="llama3_1b", choices=get_args(OffloadModelName))
    parser.add_argument("--layers", type=int, help="the first blocks that are trained; by default all")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--runs", default=",".join((OTHER_CHUNKS, *FP8_RECIPES)), help="beside bf16")
    parser.add_argument("--saved", default="full", choices=SAVED_ACTIVATIONS, help="the others are recomputed")
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--warmup", type=int, default=0, help="steps in which the learning rate grows linearly")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "fp8_text_losses.csv")
    args = parser.parse_args()
    args.layers = args.layers or MODELS[args.model].layers
    keep_compiled_kernels()
    process_setup.enable_expandable_segments(torch.device(args.device))
    text = read_text()
    tokens = args.steps * args.sequences * args.length
    print(
        f"{args.model}, {args.steps} steps of {args.sequences} x {args.length} tokens: {tokens / len(text):.2f} times "
        f"{len(text):,} bytes of text, SHA-256 {hashlib.sha256(text).hexdigest()[:16]}"
    )
    comparison = Comparison(args)
    runs = ["bf16", *args.runs.split(",")]
    for run in runs:
        comparison.train(run)
    print()
    for name in runs[1:]:
        print_difference(name, comparison.losses, max(1, args.steps // 3))


if __name__ == "__main__":
    main()
