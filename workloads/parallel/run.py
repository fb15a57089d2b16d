"""A trial of a layout: set it up, train a few steps, and say what was really laid out."""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist

from workloads import device as devices
from workloads.api.contract import Infeasible, Measurement, Rank, Scalar
from workloads.api.recipes import unsupported_rate_reason
from workloads.distributed import process_group
from workloads.llama.data import load_sequences
from workloads.llama.flops import hardware_flops_per_token, model_flops_per_token
from workloads.llama.model import fastest_attention
from workloads.llama.shapes import MODELS
from workloads.parallel import ParallelParameters
from workloads.parallel.apply import Groups, groups_of, numbers, stages_of
from workloads.parallel.communication import counted
from workloads.parallel.context import ContextAttention
from workloads.parallel.layout import why_illegal
from workloads.parallel.stage import Stage, WrittenBlock, random_weights
from workloads.parallel.train import Trainer
from workloads.precision.layers import float8_recipe
from workloads.telemetry import monitor_gpu

GIB = 2**30


def measure(parameters: ParallelParameters, rank: Rank) -> Measurement:
    """Train in this layout, together with the other ranks. Raises Infeasible for an illegal one."""
    device, layout = devices.device_of(rank), parameters.layout
    _, why = why_illegal(layout, parameters.setting(rank.world_size, rank.ranks_per_node))
    if why:
        raise Infeasible(why)
    if why := unsupported_rate_reason(parameters.dtype, devices.architecture(device)):
        raise Infeasible(f"dtype={parameters.dtype} is {why}")
    devices.release_memory(device)
    torch.compiler.reset()
    try:
        with process_group(rank, device), fastest_attention(device):
            return _train(parameters, rank, device)
    finally:
        devices.release_memory(device)


def _train(parameters: ParallelParameters, rank: Rank, device: torch.device) -> Measurement:
    shape, layout = MODELS[parameters.model], parameters.layout
    groups = groups_of(layout, device.type)
    stages = stages_of(
        *(shape, layout, groups, parameters.sequence_length, device),
        torch.float32 if parameters.dtype == "fp32" else torch.bfloat16,
        random_weights(parameters.seed, device),
        compiled=parameters.compile,
        recipe=parameters.dtype if parameters.dtype.startswith("fp8") else "",
    )
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)  # training counts, not how the weights came there
    trainer = Trainer(stages, layout, groups, device, parameters.learning_rate)
    length = parameters.sequence_length
    tokens = load_sequences(
        None, None, count=layout.global_batch, length=length + 1, vocabulary=shape.vocabulary, seed=parameters.seed
    )
    losses, times_s, communication = [], [], dict[str, float]()
    with monitor_gpu(device) as watch:
        for n in range(parameters.warmup + parameters.steps):
            dist.barrier()
            started = time.perf_counter()
            with counted(device, communication) if n == parameters.warmup - 1 else nullcontext():
                losses.append(float(trainer.step(tokens)))
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
            times_s.append(time.perf_counter() - started)
    tokens_per_step = layout.global_batch * length
    layers = shape.layers
    again = {
        "none": {},
        "selective": {"gate": layers, "up": layers},
        "full": dict.fromkeys(("qkv", "attention", "output", "gate", "up"), layers),
    }
    metrics = watch.metrics() | communication | {"loss": losses[-1], "first_loss": losses[0]}
    if device.type == "cuda":
        peak = torch.tensor(torch.cuda.max_memory_allocated(device) / GIB, device=device)
        dist.all_reduce(peak, dist.ReduceOp.MAX)  # of the rank that needs most
        metrics["peak_device_gib"] = float(peak)
    share = 1 / rank.world_size  # of the step's work: ranks are given equal parts
    return Measurement(
        executed=_executed(parameters, groups, stages, tokens.shape[1] - 1, len(times_s)),
        step_times_s=tuple(times_s[parameters.warmup :]),
        flops_per_step=model_flops_per_token(shape, length) * tokens_per_step * share,
        hardware_flops_per_step=hardware_flops_per_token(shape, length, again[layout.checkpointing])  # type: ignore[arg-type]
        * tokens_per_step
        * share,
        tokens_per_step=0 if rank.rank else tokens_per_step,  # all ranks' together
        # Attention and the head stay in bf16: of fp8's peak a mixed step has no share that means anything.
        matrix_dtype=parameters.dtype,
        metrics=metrics,
        machine_info=devices.machine_info(device)
        | watch.machine_info()
        | {"layout": str(layout), "attention": _attention(stages[0]), "parameters_kept": sum(map(numbers, stages))},
    )


def _executed(
    parameters: ParallelParameters, groups: Groups, stages: list[Stage], length: int, steps: int
) -> dict[str, Scalar]:
    """The parameters, those that a laid-out model shows read back from it."""
    mesh, context = groups.mesh, dist.get_world_size(groups.context) if groups.context is not None else 1
    blocks = (block for stage in stages for block in stage.blocks.values())
    keeps = {getattr(block, "checkpointing", "none") for block in blocks}
    found: dict[str, Scalar] = {name: getattr(parameters, name) for name in parameters.__dataclass_fields__}
    return found | {
        "replicate": mesh["replicate"].size(),
        "shard": mesh["shard"].size() // context,
        "tensor": mesh["tensor"].size(),
        "context": context,
        "pipeline": mesh["pipeline"].size(),
        "stages": len(stages),
        "checkpointing": ", ".join(sorted(keeps)),
        "dtype": _dtype(stages[0]),
        "sequence_length": length,
        "steps": steps - parameters.warmup,
    }


def _dtype(stage: Stage) -> str:
    """What the products of blocks are in."""
    layer: Any = _block(stage).qkv
    return float8_recipe(layer) or {torch.bfloat16: "bf16", torch.float32: "fp32"}[layer.weight.dtype]


def _attention(stage: Stage) -> str:
    """The name of its kernel; PyTorch's function chooses for itself, in the order of `fastest_attention`."""
    block = _block(stage)
    if isinstance(block, WrittenBlock):
        return block.maths.kernel.name
    if isinstance(block.attention, ContextAttention):
        return block.attention.kernel.name
    return "scaled_dot_product_attention"


def _block(stage: Stage) -> Any:
    """One of the stage's, without what keeps its activations."""
    block = next(iter(stage.blocks.values()))
    return getattr(block, "block", block)
