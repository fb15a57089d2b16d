"""Compare layouts of Llama 3 8B over the GPUs of this machine with a plain FSDP2 script, in one run.

    python benchmarks/parallel.py [--model llama3_8b] [--global-batch 16] [--steps 5] [--trials 12] [--time-s 300]

At 8192 tokens a sequence, with fp32 state and products in bf16, it measures one GPU alone (`workload=parallel gpus=1`),
FSDP2 as in its tutorial (each block compiled and sharded, micro-batches of two, no checkpointing, gradients clipped),
and the best layouts that `workload=parallel` finds. `--block manual` takes this project's own backward pass in both
sweeps. Results are medians over the steps after two of warm-up.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))
from workloads.layouts.layout import DEGREES, Layout
from workloads.llama.attention import AttentionShape
from workloads.llama.model import Block, Llama, rope_table, swiglu
from workloads.llama.pytorch_attention import fused_attention
from workloads.models.flops import model_flops_per_token
from workloads.models.model import MODELS, Model
from workloads.parallel.train import TokenSource

LENGTH, WARMUP = 8192, 2
PEAK_TFLOPS = 989.0


@dataclass(frozen=True)
class Training:
    """The training run of every row."""

    model: str
    global_batch: int
    steps: int


class PlainBlock(Block):
    """A block with the MLP's gate and up projections apart, as most scripts have them.

    With both in one matrix, the gradient that the compiler generates takes twice as long.
    """

    def __init__(self, shape: Model) -> None:
        super().__init__(shape)
        del self.gate_up
        self.gate, self.up = (torch.nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False) for _ in range(2))

    def _swiglu(self, x: torch.Tensor) -> torch.Tensor:
        return swiglu(self.gate(x), self.up(x))


def train_plain_fsdp(training: Training, micro_batch: int = 2) -> None:
    """Train on one rank, under torchrun. Rank 0 prints the seconds of its steps."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    shape, ranks, rank = MODELS[training.model], dist.get_world_size(), dist.get_rank()
    with torch.device("meta"):
        llama = Llama(shape)
        llama.blocks = torch.nn.ModuleList(PlainBlock(shape) for _ in range(shape.layers))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in llama.blocks:
        block.compile(dynamic=False)
        fully_shard(block, mp_policy=policy)
    fully_shard(llama, mp_policy=policy)
    llama.to_empty(device=device)
    llama.initialize(torch.Generator(device).manual_seed(rank))
    optimizer = torch.optim.AdamW(llama.parameters(), lr=1e-4, fused=True)
    rope = rope_table(shape, LENGTH, device)
    source, count = TokenSource(shape.vocabulary, LENGTH, seed=0), training.global_batch // ranks
    times_s = []
    with fused_attention(AttentionShape.of_model(shape, LENGTH, torch.bfloat16), device):
        for step in range(WARMUP + training.steps):
            tokens = source.draw(step, range(rank * count, (rank + 1) * count)).tokens.pin_memory()
            dist.barrier()
            started = time.perf_counter()
            local = tokens.to(device, non_blocking=True)
            for part in local.split(micro_batch):
                (llama(part[:, :-1].contiguous(), part[:, 1:], rope) * len(part) / len(local)).backward()
            torch.nn.utils.clip_grad_norm_(llama.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            torch.cuda.synchronize()
            times_s.append(time.perf_counter() - started)
    if rank == 0:
        gib = torch.cuda.max_memory_allocated() / 2**30
        print(json.dumps({"step_times_s": times_s[WARMUP:], "peak_device_gib": gib}))
    dist.destroy_process_group()


def run_plain_fsdp(ranks: int, training: Training) -> tuple[float, float]:
    """Run the plain script with torchrun. Returns tokens/s of all ranks, and the GiB allocated on rank 0."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", __file__]
    command += ["--plain", "--model", training.model]
    command += ["--global-batch", str(training.global_batch), "--steps", str(training.steps)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"plain FSDP2 failed:\n{done.stderr[-3000:]}")
    result = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    step_s = statistics.median(result["step_times_s"])
    return training.global_batch * LENGTH / step_s, result["peak_device_gib"]


def run_sweep(gpus: int, training: Training, folder: Path, *overrides: str) -> pd.DataFrame:
    """Run a sweep. Returns its complete trials, the best first."""
    command = [sys.executable, "-m", "sweeper", "workload=parallel", f"space.model={training.model}", f"gpus={gpus}"]
    command += [f"space.global_batch={training.global_batch}", f"space.steps={training.steps}"]
    command += [f"dir={folder}", "progress=never", *overrides]
    done = subprocess.run(command, stdout=sys.stderr)
    paths = list(folder.glob("sweeps/*/trials.csv"))
    if done.returncode == 2 and not paths:  # no layout fits, by the estimates
        return pd.DataFrame()
    if done.returncode not in (0, 1):
        sys.exit(f"the sweep ended with exit code {done.returncode}")
    (path,) = paths
    trials = pd.read_csv(path)
    return trials[trials["outcome"] == "complete"].sort_values("tokens_per_s", ascending=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama3_8b")
    parser.add_argument("--global-batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--trials", type=int, default=12)
    parser.add_argument("--time-s", type=int, default=300)
    parser.add_argument("--block", default="pytorch", choices=("pytorch", "manual"))
    parser.add_argument("--dir", help="where the sweeps are stored (default: a new folder)")
    parser.add_argument("--plain", action="store_true", help=argparse.SUPPRESS)
    args, overrides = parser.parse_known_args()
    training = Training(args.model, args.global_batch, args.steps)
    if args.plain:
        return train_plain_fsdp(training)
    gpus, flops_per_token = torch.cuda.device_count(), model_flops_per_token(MODELS[args.model], LENGTH)
    print(f"# {args.model} on {gpus} x {torch.cuda.get_device_name()}, torch {torch.__version__}, block {args.block}")
    print(f"# {LENGTH} tokens a sequence, {args.global_batch} sequences a step")
    print(f"\n{'layout':60} tokens/s per GPU    MFU    GiB")

    def print_row(name: str, tokens_per_s_per_gpu: float, gib: float) -> None:
        mfu = tokens_per_s_per_gpu * flops_per_token / PEAK_TFLOPS / 1e12
        print(f"{name:60} {tokens_per_s_per_gpu:16,.0f} {mfu:6.1%} {gib:6.1f}", flush=True)

    folder, batch_per_gpu = Path(args.dir or tempfile.mkdtemp()), args.global_batch // gpus
    fixed = [f"space.{name}=1" for name in (*DEGREES, "stages_per_rank", "micro_batch")]
    fixed += ["space.schedule=1f1b", "space.checkpointing=none", "space.reshard_after_forward=true"]
    fixed += [f"space.block={args.block}"]
    alone = replace(training, global_batch=batch_per_gpu)
    for _, trial in run_sweep(1, alone, folder / "one", "finals.top=0", "budget.trials=1", *fixed).iterrows():
        name = f"one GPU alone, {batch_per_gpu} sequences a step"  # no row where the model does not fit on one
        print_row(name, trial["tokens_per_s"], trial["peak_device_gib"])
    tokens_per_s, gib = run_plain_fsdp(gpus, training)
    print_row(f"plain FSDP2 compiled, micro-batch 2, {args.global_batch} sequences", tokens_per_s / gpus, gib)
    budget = [f"budget.trials={args.trials}", f"budget.time_s={args.time_s}", f"space.block={args.block}"]
    for _, trial in run_sweep(gpus, training, folder / "all", *budget, *overrides).iterrows():
        params = {key.removeprefix("param."): trial[key] for key in trial.index if key.startswith("param.")}
        layout = Layout(**params, global_batch=args.global_batch)
        print_row(str(layout), trial["tokens_per_s"] / gpus, trial["peak_device_gib"])


if __name__ == "__main__":
    main()
