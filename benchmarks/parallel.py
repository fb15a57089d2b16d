"""Layouts of Llama 3 8B over the GPUs of this machine, beside what a plain script makes of them, in one run.

    python benchmarks/parallel.py [--model llama3_8b] [--global-batch 16] [--steps 5] [--trials 12] [--time-s 300]

Three things at 8192 tokens a sequence and bf16: one GPU by itself (`workload=parallel gpus=1`), FSDP2 as its tutorial
has it (each block compiled and sharded, micro-batches of two, nothing computed again), and the best that
`workload=parallel` finds. Figures are medians over the steps after two of warm-up.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pandas as pd
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))
from workloads.llama.data import load_sequences
from workloads.llama.flops import model_flops_per_token
from workloads.llama.model import Block, Llama, fastest_attention, rope_table, swiglu
from workloads.llama.shapes import MODELS, LlamaShape
from workloads.parallel.layout import Layout

LENGTH, WARMUP = 8192, 2
PEAK_TFLOPS = 989.0


class PlainBlock(Block):
    """With the MLP's first two matrices apart, as scripts have them: of both in one, what the compiler makes of the
    gradient takes twice as long."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__(shape)
        del self.gate_up
        self.gate, self.up = (torch.nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False) for _ in range(2))

    def _swiglu(self, x: torch.Tensor) -> torch.Tensor:
        return swiglu(self.gate(x), self.up(x))


def plain_fsdp(model: str, global_batch: int, steps: int, micro_batch: int = 2) -> None:
    """One rank of it, under torchrun; rank 0 prints the seconds of its steps."""
    from torch.distributed.fsdp import fully_shard

    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    shape, ranks, rank = MODELS[model], dist.get_world_size(), dist.get_rank()
    with torch.device("meta"):
        llama = Llama(shape)
        llama.blocks = torch.nn.ModuleList(PlainBlock(shape) for _ in range(shape.layers))
        llama.to(torch.bfloat16)
    for block in llama.blocks:
        block.compile(dynamic=False)
        fully_shard(block)
    fully_shard(llama)
    llama.to_empty(device=device)
    llama.initialize(torch.Generator(device).manual_seed(rank))
    optimizer = torch.optim.AdamW(llama.parameters(), lr=1e-4, fused=True)
    rope = rope_table(shape, LENGTH, device)
    tokens = load_sequences(None, None, count=global_batch, length=LENGTH + 1, vocabulary=shape.vocabulary, seed=0)
    mine = tokens.chunk(ranks)[rank].to(device)
    times_s = []
    with fastest_attention(device):
        for _ in range(WARMUP + steps):
            dist.barrier()
            started = time.perf_counter()
            for part in mine.split(micro_batch):
                (llama(part[:, :-1].contiguous(), part[:, 1:], rope) * len(part) / len(mine)).backward()
            optimizer.step()
            optimizer.zero_grad()
            torch.cuda.synchronize()
            times_s.append(time.perf_counter() - started)
    if rank == 0:
        gib = torch.cuda.max_memory_allocated() / 2**30
        print(json.dumps({"step_times_s": times_s[WARMUP:], "peak_device_gib": gib}))
    dist.destroy_process_group()


def run_plain(ranks: int, model: str, global_batch: int, steps: int) -> tuple[float, float]:
    """Tokens/s of all ranks, and GiB."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", __file__]
    command += ["--plain", "--model", model, "--global-batch", str(global_batch), "--steps", str(steps)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"plain FSDP2 failed:\n{done.stderr[-3000:]}")
    found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    return global_batch * LENGTH / statistics.median(found["step_times_s"]), found["peak_device_gib"]


def sweep(gpus: int, model: str, global_batch: int, folder: Path, *said: str) -> pd.DataFrame:
    """The trials of a sweep, the best first."""
    command = [sys.executable, "-m", "sweeper", "workload=parallel", f"space.model={model}", f"gpus={gpus}"]
    command += [f"space.global_batch={global_batch}", f"dir={folder}", "progress=never", *said]
    done = subprocess.run(command, stdout=sys.stderr)
    if done.returncode:
        sys.exit(f"the sweep ended with exit code {done.returncode}")
    (found,) = folder.glob("sweeps/*/trials.csv")
    trials = pd.read_csv(found)
    return trials[trials["outcome"] == "complete"].sort_values("tokens_per_s", ascending=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama3_8b")
    parser.add_argument("--global-batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--trials", type=int, default=12)
    parser.add_argument("--time-s", type=int, default=300)
    parser.add_argument("--dir", help="where the sweeps are kept (default: a new folder)")
    parser.add_argument("--plain", action="store_true", help=argparse.SUPPRESS)
    said, more = parser.parse_known_args()
    if said.plain:
        return plain_fsdp(said.model, said.global_batch, said.steps)
    gpus, per_s_flops = torch.cuda.device_count(), model_flops_per_token(MODELS[said.model], LENGTH)
    print(f"# {said.model} on {gpus} x {torch.cuda.get_device_name()}, torch {torch.__version__}, bf16")
    print(f"# {LENGTH} tokens a sequence, {said.global_batch} sequences a step")
    print(f"\n{'what':60} tokens/s per GPU    MFU    GiB")

    def row(what: str, per_gpu: float, gib: float) -> None:
        print(f"{what:60} {per_gpu:16,.0f} {per_gpu * per_s_flops / PEAK_TFLOPS / 1e12:6.1%} {gib:6.1f}", flush=True)

    folder, alone = Path(said.dir or tempfile.mkdtemp()), said.global_batch // gpus
    fixed = [f"space.{name}=1" for name in ("replicate", "shard", "tensor", "context", "pipeline", "stages")]
    fixed += ["space.schedule=1f1b", "space.checkpointing=none", "space.micro_batch=1", "space.reshard=true"]
    fixed += [f"space.steps={said.steps}"]
    one = sweep(1, said.model, alone, folder / "one", "finals.top=0", "budget.trials=1", *fixed).iloc[0]
    row(f"one GPU by itself, {alone} sequences a step", one["tokens_per_s"], one["peak_device_gib"])
    per_s, gib = run_plain(gpus, said.model, said.global_batch, said.steps)
    row(f"plain FSDP2 compiled, micro-batch 2, {said.global_batch} sequences", per_s / gpus, gib)
    budget = [f"space.steps={said.steps}", f"budget.trials={said.trials}", f"budget.time_s={said.time_s}"]
    for _, trial in sweep(gpus, said.model, said.global_batch, folder / "all", *budget, *more).iterrows():
        params = {key.removeprefix("param."): trial[key] for key in trial.index if key.startswith("param.")}
        layout = Layout(**params, global_batch=said.global_batch)
        row(str(layout), trial["tokens_per_s"] / gpus, trial["peak_device_gib"])


if __name__ == "__main__":
    main()
