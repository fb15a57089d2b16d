"""Run one trial of a layout: set it up, train a few steps, and read back the layout that ran."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from workloads.api.contract import Infeasible, Measurement, Rank, Scalar
from workloads.instruments import device as devices
from workloads.instruments.distributed import process_group
from workloads.instruments.telemetry import GpuReadings, monitor_gpu
from workloads.layouts.layout import Layout
from workloads.llama.attention import AttentionShape
from workloads.llama.pytorch_attention import DocumentAttention, fastest_attention
from workloads.models.flops import hardware_flops_per_token, model_flops_per_token
from workloads.models.model import MODELS
from workloads.offload import process_setup
from workloads.parallel import ParallelParameters
from workloads.parallel.apply import (
    Groups,
    ModelSpec,
    build_groups,
    build_stages,
    count_local_parameters,
    fp8_gathers,
)
from workloads.parallel.async_tp import count_fused_calls, separate_group_names
from workloads.parallel.batches import Batch, TokenSource, local_sequences
from workloads.parallel.communication import profile_communication
from workloads.parallel.context import ContextAttention
from workloads.parallel.fsdp import gathered_dtype, reduction_dtype
from workloads.parallel.garbage_collection import GarbageCollector, schedule_garbage_collection
from workloads.parallel.stage import ManualBackwardBlock, Stage, build_initializer
from workloads.parallel.train import Trainer
from workloads.precision import unsupported_layer_rate_reason
from workloads.precision.formats import require_torchao
from workloads.precision.layers import read_recipe

GIB = 2**30
DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32"}


def measure(parameters: ParallelParameters, rank: Rank) -> Measurement:
    """Train in this layout, together with the other ranks.

    Raises:
        Infeasible: the layout is invalid, the device does not support the data type or the attention, or torchao is
            not installed.
    """
    device = devices.device_of(rank)
    if violation := parameters.find_violation(rank.world_size, rank.ranks_per_node, on_gpu=device.type == "cuda"):
        raise Infeasible(violation.reason)
    if reason := unsupported_layer_rate_reason(parameters.dtype, devices.architecture(device)):
        raise Infeasible(f"dtype={parameters.dtype} is {reason}")
    if _model_spec(parameters).recipe:
        require_torchao()
    devices.release_memory(device)
    process_setup.enable_expandable_segments(device)  # as torchtitan's run_train.sh sets it
    torch.compiler.reset()
    try:
        with _fused_attention(parameters, device) as kernel, process_group(rank, device):
            return _train(parameters, rank, device, kernel)
    finally:
        devices.release_memory(device)


def _fused_attention(parameters: ParallelParameters, device: torch.device) -> AbstractContextManager[str]:
    """Return a context that yields the kernel of PyTorch's attention; empty where blocks have a kernel of their own."""
    layout, spec = parameters.layout, _model_spec(parameters)
    if layout.cp > 1 or spec.document_tokens or spec.block == "manual":
        return nullcontext("")
    return fastest_attention(AttentionShape.of_model(spec.shape, spec.sequence_length, spec.dtype, layout.tp), device)


def _train(parameters: ParallelParameters, rank: Rank, device: torch.device, sdpa_kernel: str) -> Measurement:
    shape, layout, length = MODELS[parameters.model], parameters.layout, parameters.sequence_length
    if parameters.async_tp:
        separate_group_names(rank.sequence_number)
    groups = build_groups(layout, device.type)
    trainer = _build_trainer(parameters, groups, device)
    source = TokenSource(shape.vocabulary, length, parameters.seed, parameters.document_tokens)
    sequences = local_sequences(layout, groups)
    with monitor_gpu(device) as watch, schedule_garbage_collection(parameters.gc_freq) as collector:
        draw_batch = partial(_draw_batch, source, sequences, device)
        run = _run_steps(parameters, trainer, draw_batch, collector, watch, device)
    metrics = watch.metrics() | run.communication | {"loss": run.losses[-1], "first_loss": run.losses[0]}
    if trainer.gradient_norm is not None:
        metrics["gradient_norm"] = float(trainer.gradient_norm)
    if device.type == "cuda":
        metrics["peak_device_gib"] = _peak_gib(torch.cuda.max_memory_allocated(device), device)
        metrics["peak_reserved_gib"] = _peak_gib(torch.cuda.max_memory_reserved(device), device)
    tokens_per_step = layout.global_batch * length
    share = 1 / rank.world_size  # every rank does an equal share of the step's work
    attended = parameters.attended_length
    hardware_flops = hardware_flops_per_token(shape, attended, _recomputed_products(parameters))  # type: ignore[arg-type]
    return Measurement(
        executed=_executed_parameters(parameters, groups, trainer) | run.executed,
        step_times_s=tuple(run.times_s[parameters.warmup :]),
        flops_per_step=model_flops_per_token(shape, attended) * tokens_per_step * share,
        hardware_flops_per_step=hardware_flops * tokens_per_step * share,
        tokens_per_step=0 if rank.rank else tokens_per_step,  # rank 0 reports those of all ranks
        # Attention and the head stay in bf16: a mixed step has no meaningful share of the fp8 peak.
        matrix_dtype=parameters.dtype,
        energy=watch.energy(parameters.steps),
        metrics=metrics,
        machine_info=devices.machine_info(device)
        | watch.machine_info()
        | process_setup.describe_segments(device)
        | {
            "layout": str(layout),
            "attention": _attention_kernel(trainer.stages[0], sdpa_kernel),
            "parameters_kept": sum(map(count_local_parameters, trainer.stages)),
        }
        | fp8_gathers(trainer.stages[0]),
    )


def _build_trainer(parameters: ParallelParameters, groups: Groups, device: torch.device) -> Trainer:
    layout, spec = parameters.layout, _model_spec(parameters)
    initializer = build_initializer(parameters.seed, device, is_tied=spec.shape.tied)
    stages = build_stages(spec, layout, groups, device, initializer)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)  # the peak is of training, not of filling the weights
    return Trainer(stages, layout, groups, device, parameters.learning_rate, clips=parameters.state == "fp32")


def _model_spec(parameters: ParallelParameters) -> ModelSpec:
    return ModelSpec(
        MODELS[parameters.model],
        parameters.sequence_length,
        torch.float32 if parameters.dtype == "fp32" else torch.bfloat16,
        recipe="" if parameters.dtype in ("bf16", "fp32") else parameters.dtype,
        compiled=parameters.compile,
        state=parameters.state,
        block=parameters.block,
        document_tokens=parameters.document_tokens,
    )


@dataclass(frozen=True)
class _TrainingRun:
    """The steps of a training run, warm-up included, and the communication metrics of the last warm-up step."""

    times_s: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    communication: dict[str, float] = field(default_factory=dict)
    executed: dict[str, Scalar] = field(default_factory=dict)


def _draw_batch(source: TokenSource, sequences: range, device: torch.device, step: int) -> Batch:
    """Return this rank's sequences of a step in the host's memory, ready to be copied without waiting."""
    batch = source.draw(step, sequences)
    return batch.pin_memory() if device.type == "cuda" else batch


def _run_steps(
    parameters: ParallelParameters,
    trainer: Trainer,
    draw_batch: Callable[[int], Batch],
    collector: GarbageCollector,
    readings: GpuReadings,
    device: torch.device,
) -> _TrainingRun:
    """Train on new tokens in each step, and profile the last warm-up step.

    Tokens are drawn between steps, as a data loader's processes prepare them; their copy to the device is timed.
    """
    run = _TrainingRun()
    for step in range(parameters.warmup + parameters.steps):
        batch = draw_batch(step)
        dist.barrier()
        if step == parameters.warmup:
            readings.begin_steps()
        started = time.perf_counter()
        collector.start_step(step)
        is_profiled = step == parameters.warmup - 1
        with profile_communication(device, run.communication) if is_profiled else nullcontext():
            run.losses.append(float(trainer.step(batch)))
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        run.times_s.append(time.perf_counter() - started)
    run.executed["sequence_length"] = batch.tokens.shape[1] - 1
    run.executed["steps"] = len(run.times_s) - parameters.warmup
    run.executed["gc_freq"] = collector.executed_freq
    run.executed["schedule"] = trainer.executed_schedule
    run.executed["cuda_graph"] = trainer.executed_cuda_graph
    run.executed["async_tp"] = count_fused_calls(run.communication) > 0
    return run


def _peak_gib(local_bytes: int, device: torch.device) -> float:
    """Return a peak of memory in GiB, of the rank that needs the most."""
    peak = torch.tensor(local_bytes / GIB, device=device)
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    return float(peak)


def _recomputed_products(parameters: ParallelParameters) -> dict[str, int]:
    """Return in how many layers each product is recomputed."""
    layers = parameters.layout.count_checkpointed(MODELS[parameters.model].layers)
    products = {"none": (), "selective": ("gate", "up"), "full": ("qkv", "attention", "output", "gate", "up")}
    return dict.fromkeys(products[parameters.checkpointing], layers)


def _executed_parameters(parameters: ParallelParameters, groups: Groups, trainer: Trainer) -> dict[str, Scalar]:
    """Return the parameters, as far as possible read back from the model that ran."""
    stages = trainer.stages
    mesh, cp = groups.mesh, dist.get_world_size(groups.cp_group) if groups.cp_group is not None else 1
    requested: dict[str, Scalar] = {name: getattr(parameters, name) for name in parameters.__dataclass_fields__}
    return (
        requested
        | {
            "dp_replicate": mesh["dp_replicate"].size(),
            "dp_shard": mesh["dp_shard_cp"].size() // cp,
            "tp": mesh["tp"].size(),
            "cp": cp,
            "document_tokens": getattr(stages[0].first_block.attention, "document_tokens", 0),
            "cp_method": getattr(stages[0].first_block.attention, "method", "allgather"),
            "pp": mesh["pp"].size(),
            "stages_per_rank": len(stages),
            "dtype": _block_dtype(stages[0]),
            "state": _state_dtype(trainer),
            "block": "manual" if isinstance(stages[0].first_block, ManualBackwardBlock) else "pytorch",
        }
        | _executed_checkpointing(parameters.layout, stages)
    )


def _executed_checkpointing(layout: Layout, stages: list[Stage]) -> dict[str, Scalar]:
    """Return the layout's checkpointing where each of this rank's blocks has it; else what the blocks have."""
    blocks = {int(name): block for stage in stages for name, block in stage.blocks.items()}
    executed = {number: getattr(block, "checkpointing", "none") for number, block in blocks.items()}
    if executed == {number: layout.checkpointing_of(number) for number in blocks}:
        return {"checkpointing": layout.checkpointing, "checkpointing_freq": layout.checkpointing_freq}
    return {"checkpointing": ", ".join(sorted(set(executed.values())))}


def _block_dtype(stage: Stage) -> str:
    """Return the data type or recipe of the matrix products of blocks."""
    layer: Any = stage.first_block.qkv
    if recipe := read_recipe(layer):
        return recipe
    return DTYPE_NAMES[gathered_dtype(stage) or layer.weight.dtype]


def _state_dtype(trainer: Trainer) -> str:
    """Return the data type of weights, optimizer states and the reduction of gradients; several if they differ."""
    reductions = {dtype for stage in trainer.stages if (dtype := reduction_dtype(stage))}
    return ", ".join(sorted(DTYPE_NAMES[dtype] for dtype in trainer.state_dtypes() | reductions))


def _attention_kernel(stage: Stage, sdpa_kernel: str) -> str:
    """Return the name of the attention kernel, and of PyTorch's function with the one that it takes on a GPU."""
    block = stage.first_block
    if isinstance(block, ManualBackwardBlock):
        return block.block_math.kernel.name
    if isinstance(block.attention, DocumentAttention):
        return block.attention.name
    if isinstance(block.attention, ContextAttention):
        return block.attention.kernel.name
    return f"scaled_dot_product_attention ({sdpa_kernel})" if sdpa_kernel else "scaled_dot_product_attention"
