"""Llama training within memory budgets on one GPU, beside what others reach.

    python benchmarks/offload.py [--rows 8b_8k,8b_8k_large,1b_8k,8b_512,8b_64k,cpu_offload] [--steps 1]
    python benchmarks/offload.py --rows cpu_offload_small
    python benchmarks/offload.py --rows 8b_64k_large         # as much host memory as its plan takes, up to 144 GiB
    python benchmarks/offload.py --rows 1b_256k

All rows run in this process, one after the other, on made-up tokens and random weights; each is one warm-up step and
the median of `--steps`. The reference is ml_dataflow on one H100 (its published table; steps of 557,056 to
622,592 tokens).
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from dataclasses import dataclass

import torch

from workloads import device as devices
from workloads.api.contract import Infeasible, Rank
from workloads.api.trial import run_trial
from workloads.llama.data import load_sequences
from workloads.llama.flops import model_flops_per_token
from workloads.llama.model import Llama, fastest_attention, rope_table
from workloads.llama.shapes import MODELS

PEAK_TFLOPS = 989.5  # bf16, dense: conf/hardware/h200.yaml


@dataclass(frozen=True)
class Row:
    model: str
    sequence_length: int
    host_gib: float
    device_gib: float
    sequences: int
    reference_tokens_per_s: float | None = None


# Figures of the reference: tokens/s at the same budgets.
ROWS = {  # CPUOffloadPolicy comes last, and once in a process: it leaves host memory behind
    "8b_8k": [
        Row("llama3_8b", 8192, 8, 130, 16),
        Row("llama3_8b", 8192, 75, 78, 16, 11406),
        Row("llama3_8b", 8192, 70, 40, 16, 10135),
        Row("llama3_8b", 8192, 60, 24, 16, 9478),
    ],
    "8b_8k_large": [Row("llama3_8b", 8192, 75, 78, 68, 11406)],  # a step as large as the reference's
    "1b_8k": [Row("llama3_1b", 8192, 4, 78, 64, 55090)],
    "8b_512": [Row("llama3_8b", 512, 70, 78, 256, 13135)],
    "8b_64k": [Row("llama3_8b", 65536, 112, 78, 5, 5401)],
    "8b_64k_large": [Row("llama3_8b", 65536, 144, 78, 5, 5487)],
    "1b_256k": [Row("llama3_1b", 262144, 60, 24, 1)],
    "cpu_offload": [Row("llama3_8b", 8192, 60, 24, 4)],
    "cpu_offload_small": [Row("llama3_8b", 8192, 60, 24, 1)],
}


def measured(row: Row, steps: int) -> str:
    asked = {
        "model": row.model,
        "sequence_length": row.sequence_length,
        "sequences_per_step": row.sequences,
        "host_gib": row.host_gib,
        "device_gib": row.device_gib,
        "steps": steps,
    }
    started = time.perf_counter()
    try:
        m = run_trial("offload", asked, Rank(device="cuda"))
    except Infeasible as error:
        return f"infeasible: {error}"
    step_s, f = statistics.median(m.step_times_s), m.metrics
    per_s, reference = m.tokens_per_step / step_s, row.reference_tokens_per_s
    return (
        f"{per_s:8,.0f} | {f['predicted_tokens_per_s']:8,.0f} | {f'{reference:,.0f}' if reference else '':>6} | "
        f"{m.flops_per_step / step_s / PEAK_TFLOPS / 1e12:5.1%} | "
        f"{m.hardware_flops_per_step / step_s / PEAK_TFLOPS / 1e12:5.1%} | "
        f"{f['copy_wait_share']:5.1%} | {f['optimizer_share']:5.1%} | "
        f"{f['peak_device_gib']:6.1f} | {f['peak_host_gib']:6.1f} | "
        f"{f['copied_gib_per_step']:6.0f} | {f['sm_clock_mhz']:5.0f} | {time.perf_counter() - started:4.0f}"
    )


def fsdp_cpu_offload(row: Row, steps: int) -> str:
    """The same training with FSDP2's CPUOffloadPolicy, each block recomputed in the backward pass and compiled, AdamW
    fused on the host; gradients gather over the sequences on the device before they are sent."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29531", "RANK": "0", "WORLD_SIZE": "1"}
    torch.distributed.init_process_group("cpu:gloo,cuda:nccl")
    device, shape = torch.device("cuda", 0), MODELS[row.model]
    devices.release_memory(device)
    torch.compiler.reset()
    torch.cuda.set_per_process_memory_fraction(
        row.device_gib * 2**30 / torch.cuda.get_device_properties(device).total_memory
    )
    with torch.device("meta"):
        model = Llama(shape).to(torch.bfloat16)
    policy = {"offload_policy": CPUOffloadPolicy(), "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}
    for n, block in enumerate(model.blocks):
        model.blocks[n] = checkpoint_wrapper(block)
        model.blocks[n].compile(dynamic=False)
        fully_shard(model.blocks[n], **policy)
    fully_shard(model, **policy)
    model.to_empty(device="cpu")
    noise = torch.randn(1 << 22, dtype=torch.bfloat16) * 0.02  # of each weight the same, since a host draws slowly
    with torch.no_grad():
        for parameter in model.parameters():
            local = parameter.to_local().view(-1)  # type: ignore[attr-defined]
            local.fill_(1.0) if parameter.dim() == 1 else local.copy_(
                noise.repeat(-(-len(local) // len(noise)))[: len(local)]
            )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    rope = rope_table(shape, row.sequence_length, device)
    tokens = load_sequences(
        None, None, count=row.sequences, length=row.sequence_length + 1, vocabulary=shape.vocabulary, seed=0
    ).to(device)
    times_s = []
    with fastest_attention(device):
        for _ in range(1 + steps):
            started = time.perf_counter()
            for n, sequence in enumerate(tokens):
                last = n == len(tokens) - 1
                model.set_requires_gradient_sync(last)
                model.set_is_last_backward(last)
                (model(sequence[None, :-1], sequence[None, 1:], rope) / row.sequences).backward()
            optimizer.step()
            optimizer.zero_grad()
            torch.cuda.synchronize()
            times_s.append(time.perf_counter() - started)
    torch.distributed.destroy_process_group()
    step_s = statistics.median(times_s[1:])
    per_s = row.sequences * row.sequence_length / step_s
    mfu = per_s * model_flops_per_token(shape, row.sequence_length) / PEAK_TFLOPS / 1e12
    return f"{per_s:8,.0f} |          |        | {mfu:5.1%} | peak {torch.cuda.max_memory_reserved() / 2**30:.1f} GiB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="8b_8k,8b_8k_large,1b_8k,8b_512,8b_64k,cpu_offload")
    parser.add_argument("--steps", type=int, default=1)
    said = parser.parse_args()
    print(f"# Offloading: {torch.cuda.get_device_name()}, torch {torch.__version__}, Python {sys.version.split()[0]}\n")
    print("model, tokens of a sequence, tokens a step, host/device GiB")
    print(
        "tokens/s | predicted | reference | MFU | HFU | waiting | optimizer | peak device, host GiB | "
        "copied GiB a step | SM MHz | s in all\n"
    )
    for name in said.rows.split(","):
        for row in ROWS[name]:
            print(
                f"{row.model} {row.sequence_length} {row.sequences * row.sequence_length} "
                f"{row.host_gib:g}/{row.device_gib:g}: {measured(row, said.steps)}",
                flush=True,
            )
            if name.startswith("cpu_offload"):
                print(f"… with FSDP2's CPUOffloadPolicy: {fsdp_cpu_offload(row, said.steps)}", flush=True)


if __name__ == "__main__":
    main()
