"""Measure Llama training within memory budgets, compared with published results and FSDP2's CPU offloading.

    python benchmarks/offload.py [--rows 8b_8k,8b_8k_large,1b_8k,8b_512,8b_64k,cpu_offload] [--steps 1]
    python benchmarks/offload.py --rows cpu_offload_small
    python benchmarks/offload.py --rows 8b_8k_fp8 --steps 3     # bf16 and fp8 interleaved, at four budgets
    python benchmarks/offload.py --rows 8b_8k_recipes --steps 3 # bf16, one scale for a matrix, scales of blocks
    python benchmarks/offload.py --rows qwen_1k,qwen14b_1k,qwen14b_1k_fp8,qwen14b_1k_states --steps 2
    python benchmarks/offload.py --rows 8b_64k_large         # needs up to 144 GiB of host memory
    python benchmarks/offload.py --rows 1b_256k
    python benchmarks/offload.py --rows 8b_gang,32b_gang:0     # one GPU, and two of one host
    python benchmarks/offload.py --rows 8b_gang,32b_gang --predict h100   # without a GPU, by the catalogue's rates

Rows run one after the other, on synthetic tokens and random weights; gang rows run in separate processes. Each has one
warm-up step and reports the median of `--steps` steps. The reference is ml_dataflow on one H100 (its published table;
steps of 557,056 to 622,592 tokens).
"""

import argparse
import math
import multiprocessing
import os
import queue
import socket
import statistics
import sys
import time
from dataclasses import dataclass, replace
from typing import Any

import torch

from tests.support.llama import Llama
from workloads.api.contract import Infeasible, Machine, Measurement, Rank
from workloads.api.trial import run_trial
from workloads.instruments import device as devices
from workloads.instruments import process_setup
from workloads.llama.attention import AttentionShape
from workloads.llama.data import load_sequences
from workloads.llama.model import rope_table
from workloads.llama.pytorch_attention import fused_attention
from workloads.models.flops import model_flops_per_token
from workloads.models.model import MODELS
from workloads.offload import Offload

PEAK_TFLOPS = 989.5  # bf16, dense: conf/hardware/h200.yaml


@dataclass(frozen=True)
class Row:
    """One training run. `reference_tokens_per_s` is the reference's bf16 rate at the same budgets.

    `gpus` is the number of GPUs, which train in one process each and share `host_gib`; 0 means one GPU in this process.
    """

    model: str
    sequence_length: int
    host_gib: float
    device_gib: float
    sequences: int
    reference_tokens_per_s: float | None = None
    dtype: str = "bf16"
    optimizer_states: str | None = None
    master_weights: str = "none"
    gpus: int = 0
    distribution: str | None = None

    @property
    def parameters(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "sequence_length": self.sequence_length,
            "sequences_per_step": self.sequences,
            "host_gib": self.host_gib,
            "device_gib": self.device_gib,
            "dtype": self.dtype,
            "optimizer_states": self.optimizer_states,
            "master_weights": self.master_weights,
            "distribution": self.distribution,
        }


# CPUOffloadPolicy runs last, and only once per process, because it does not free its host memory.
ROWS = {
    "8b_8k": [
        Row("llama3_8b", 8192, 8, 130, 16),
        Row("llama3_8b", 8192, 75, 78, 16, 11406),
        Row("llama3_8b", 8192, 70, 40, 16, 10135),
        Row("llama3_8b", 8192, 60, 24, 16, 9478),
    ],
    "8b_8k_fp8": [
        Row("llama3_8b", 8192, host_gib, device_gib, 16, dtype=dtype)
        for host_gib, device_gib in ((8, 130), (75, 78), (70, 40), (60, 24))
        for dtype in ("bf16", "fp8_tensorwise")
    ],
    "8b_8k_recipes": [
        Row("llama3_8b", 8192, 8, 130, 16, dtype=dtype) for dtype in ("fp8_blockwise", "bf16", "fp8_tensorwise")
    ],
    "qwen_1k": [Row("qwen2_5_7b", 1024, 8, 130, 128, dtype=dtype) for dtype in ("fp8_tensorwise", "bf16")],
    "qwen14b_1k": [Row("qwen2_5_14b", 1024, 112, 78, 128, 6336)],
    "qwen14b_1k_fp8": [Row("qwen2_5_14b", 1024, 112, 78, 128, 9370, dtype="fp8_tensorwise")],
    "qwen14b_1k_states": [
        Row("qwen2_5_14b", 1024, 112, 78, 128, optimizer_states=states, master_weights="fp32")
        for states in ("bf16", "int8")
    ],
    "8b_8k_large": [Row("llama3_8b", 8192, 75, 78, 68, 11406)],  # steps as large as those of the reference
    "1b_8k": [Row("llama3_1b", 8192, 4, 78, 64, 55090)],
    "8b_512": [Row("llama3_8b", 512, 70, 78, 256, 13135)],
    "8b_64k": [Row("llama3_8b", 65536, 112, 78, 5, 5401)],
    "8b_64k_large": [Row("llama3_8b", 65536, 144, 78, 5, 5487)],
    # The budgets of a host with 256 GiB of memory and two H100s.
    "8b_gang": [
        Row("llama3_8b", 8192, 16, 72, 16, gpus=1),
        Row("llama3_8b", 8192, 32, 72, 32, gpus=2, distribution="replicas"),
        Row("llama3_8b", 8192, 32, 72, 32, gpus=2, distribution="sharded"),
        Row("llama3_8b", 8192, 60, 24, 16, gpus=1),
        Row("llama3_8b", 8192, 120, 24, 32, gpus=2, distribution="replicas"),
    ],
    "32b_gang": [Row("qwen2_5_32b", 8192, 200, 72, 32, gpus=2, distribution="sharded")],
    # Two H200s of a host with 251 GiB.
    **{
        f"70b_gang{suffix}": [Row("llama3_70b", 8192, 228, 137, sequences, None, dtype, "int8", "none", 2, "sharded")]
        for suffix, dtype, sequences in (("", "bf16", 64), ("_fp8", "fp8_tensorwise", 32))
    },
    "32b_gang_h200": [Row("qwen2_5_32b", 8192, 224, 132, 64, gpus=2, distribution="sharded")],
    "32b_ring": [Row("qwen2_5_32b", 8192, 200, 72, 32, gpus=2, distribution="ring")],
    "70b_ring": [Row("llama3_70b", 8192, 228, 137, 32, optimizer_states="int8", gpus=2, distribution="ring")],
    "1b_256k": [Row("llama3_1b", 262144, 60, 24, 1)],
    "cpu_offload": [Row("llama3_8b", 8192, 60, 24, 4)],
    "cpu_offload_small": [Row("llama3_8b", 8192, 60, 24, 1)],
}


def list_rows(names: str, sequences: int | None) -> list[Row]:
    """Return the rows for comma-separated names; `8b_gang:1` is the second row of its name.

    `sequences` overrides the number of sequences per step.
    """
    rows = []
    for name, _, index in (name.partition(":") for name in names.split(",")):
        rows += [ROWS[name][int(index)]] if index else ROWS[name]
    return [replace(row, sequences=sequences or row.sequences) for row in rows]


def measure_row(row: Row, steps: dict[str, int | None]) -> str:
    """Run a row and return its columns."""
    started, parameters, gpus = time.perf_counter(), row.parameters | steps, max(1, row.gpus)
    try:
        if row.gpus:
            ranks = run_gang(row.gpus, parameters)
        else:
            ranks = {0: run_trial("offload", parameters, Rank(device="cuda"))}
    except Infeasible as error:
        return f"infeasible: {error}"
    measurement = ranks[0]
    step_s, metrics = statistics.median(measurement.step_times_s), measurement.metrics
    if row.gpus:
        print(f"  {measurement.machine_info['plan']}\n  start: {measurement.machine_info['startup']}")
        energies = [one.energy for one in ranks.values() if one.energy and not one.energy.missing]
        joules = sum(energy.joules / energy.steps for energy in energies) / measurement.tokens_per_step / gpus
        times = ", ".join(f"{time_s:.3f}" for time_s in measurement.step_times_s)
        print(
            f"  {joules:.4f} J/token of {len(energies)} GPUs, steps of {times} s, {metrics['rounds']:.0f} rounds, "
            f"exchanged {metrics['exchanged_gib_per_step']:.0f} GiB"
        )
    peak = PEAK_TFLOPS * 1e12 if row.dtype == "bf16" else math.nan  # a step in two formats has no common peak
    reference = f"{row.reference_tokens_per_s:,.0f}" if row.reference_tokens_per_s else ""
    return (
        f"{gpus * measurement.tokens_per_step / step_s:8,.0f} | {metrics['predicted_tokens_per_s']:8,.0f} | "
        f"{reference:>6} | "
        f"{measurement.flops_per_step / step_s / peak:5.1%} | "
        f"{measurement.hardware_flops_per_step / step_s / peak:5.1%} | "
        f"{metrics['copy_wait_share']:5.1%} | {metrics['optimizer_share']:5.1%} | "
        f"{metrics['peak_device_gib']:6.1f} | {metrics['peak_host_gib']:6.1f} | "
        f"{metrics['copied_gib_per_step']:6.0f} | {metrics['sm_clock_mhz']:5.0f} | "
        f"{metrics['startup_s']:5.1f} | {time.perf_counter() - started:4.0f}"
    )


def run_gang(gpus: int, parameters: dict[str, Any]) -> dict[int, Measurement]:
    """Run a trial on GPUs of this host, and return each rank's measurement. Raises the first failing rank's exception.

    Raises RuntimeError if a rank ended without a result.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    results: Any = context.Queue()
    ranks = [context.Process(target=run_rank, args=(n, gpus, port, parameters, results)) for n in range(gpus)]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    done: dict[int, Measurement] = {}
    try:
        numbers = visible.split(",") if visible else map(str, range(gpus))
        for process, os.environ["CUDA_VISIBLE_DEVICES"] in zip(ranks, numbers, strict=False):  # as a worker sees it
            process.start()
        while len(done) < gpus:
            ended = [
                f"rank {n} ended with status {process.exitcode}"
                for n, process in enumerate(ranks)
                if n not in done and process.exitcode is not None
            ]
            try:
                number, result = results.get(timeout=1)
            except queue.Empty:
                if ended:  # the rank ended before the queue was empty
                    raise RuntimeError(", ".join(ended)) from None
                continue
            if isinstance(result, Exception):
                raise result
            done[number] = result
    finally:
        os.environ.pop("CUDA_VISIBLE_DEVICES")
        os.environ |= {"CUDA_VISIBLE_DEVICES": visible} if visible else {}
        for process in ranks:
            process.kill()
            process.join()
    return done


def run_rank(number: int, gpus: int, port: int, parameters: dict[str, Any], results: Any) -> None:
    rank = Rank(number, gpus, "cuda", ranks_per_node=gpus, rendezvous=f"127.0.0.1:{port}")
    try:
        results.put((number, run_trial("offload", parameters, rank)))
    except Exception as error:
        results.put((number, error))


def predict_row(row: Row, hardware: str) -> str:
    """Return a row's columns as planned with the catalogue's rates."""
    from sweeper.preflight.clusters import build_cluster

    gpus = max(1, row.gpus)
    cluster = build_cluster(hardware, None, gpus)
    machine = Machine("gpu", cluster.device.architecture, gpus, gpus, cluster.device.memory_gib, cluster)
    (candidate,) = Offload().list_candidates({}, row.parameters, machine)
    estimate = candidate.estimate
    if estimate.unsupported_reason:
        return estimate.unsupported_reason
    tokens_per_s = estimate.metrics["tokens_per_s"]
    mfu = tokens_per_s * model_flops_per_token(MODELS[row.model], row.sequence_length) / gpus / PEAK_TFLOPS / 1e12
    memory = f"{estimate.metrics['memory_gib']:.1f}, {estimate.metrics['peak_host_gib']:.1f} GiB"
    return f"{tokens_per_s:8,.0f} | MFU {mfu:5.1%} | {memory}"


def measure_fsdp_cpu_offload(row: Row, steps: int) -> str:
    """Run the same training with FSDP2's CPUOffloadPolicy and return its columns.

    Each block is compiled and recomputed in the backward pass, and AdamW is fused on the host. Gradients accumulate on
    the device over the sequences before they are copied to the host.
    """
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
    noise = torch.randn(1 << 22, dtype=torch.bfloat16) * 0.02  # reused for all weights, since drawing is slow
    with torch.no_grad():
        for parameter in model.parameters():
            local = parameter.to_local().view(-1)  # type: ignore[attr-defined]
            if parameter.dim() == 1:
                local.fill_(1.0)
            else:
                local.copy_(noise.repeat(-(-len(local) // len(noise)))[: len(local)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    rope = rope_table(shape, row.sequence_length, device)
    tokens = load_sequences(
        None, None, count=row.sequences, length=row.sequence_length + 1, vocabulary=shape.vocabulary, seed=0
    ).to(device)
    times_s = []
    with fused_attention(AttentionShape.of_model(shape, row.sequence_length, torch.bfloat16), device):
        for _ in range(1 + steps):
            started = time.perf_counter()
            for n, sequence in enumerate(tokens):
                last = n == len(tokens) - 1
                model.set_requires_gradient_sync(last)
                model.set_is_last_backward(last)
                model(sequence[None, :-1], sequence[None, 1:], rope, 1 / row.sequences).backward()
            optimizer.step()
            optimizer.zero_grad()
            torch.cuda.synchronize()
            times_s.append(time.perf_counter() - started)
    torch.distributed.destroy_process_group()
    step_s = statistics.median(times_s[1:])
    tokens_per_s = row.sequences * row.sequence_length / step_s
    mfu = tokens_per_s * model_flops_per_token(shape, row.sequence_length) / PEAK_TFLOPS / 1e12
    peak_gib = torch.cuda.max_memory_reserved() / 2**30
    return f"{tokens_per_s:8,.0f} |          |        | {mfu:5.1%} | peak {peak_gib:.1f} GiB"


def name_row(row: Row) -> str:
    gang = f"{row.gpus} GPUs {row.distribution or ''} " if row.gpus else ""
    return (
        f"{gang}{row.model} {row.dtype} {row.optimizer_states or ''} {row.sequence_length} "
        f"{row.sequences * row.sequence_length} {row.host_gib:g}/{row.device_gib:g}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="8b_8k,8b_8k_large,1b_8k,8b_512,8b_64k,cpu_offload")
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--warmup-rounds", type=int, help="the most rounds of the warm-up step")
    parser.add_argument("--sequences", type=int, help="of a step, in place of those of the rows")
    parser.add_argument("--predict", metavar="HARDWARE", help="print what plans say, and measure nothing")
    args = parser.parse_args()
    if args.predict:
        for row in list_rows(args.rows, args.sequences):
            print(f"{name_row(row)}: {predict_row(row, args.predict)}", flush=True)
        return
    process_setup.enable_expandable_segments(torch.device("cuda", 0))  # before anything else that initializes CUDA
    print(f"# Offloading: {torch.cuda.get_device_name()}, torch {torch.__version__}, Python {sys.version.split()[0]}\n")
    print("model, dtype, tokens per sequence, tokens per step, host/device GiB")
    print(
        "tokens/s | predicted | reference | MFU | HFU | copy wait | optimizer | peak device, host GiB | "
        "copied GiB per step | SM MHz | startup s | total s\n"
    )
    for row in list_rows(args.rows, args.sequences):
        steps = {"steps": args.steps, "warmup_rounds": args.warmup_rounds}
        print(f"{name_row(row)}: {measure_row(row, steps)}", flush=True)
        if row in ROWS["cpu_offload"] + ROWS["cpu_offload_small"]:
            print(f"… with FSDP2's CPUOffloadPolicy: {measure_fsdp_cpu_offload(row, args.steps)}", flush=True)


if __name__ == "__main__":
    main()
