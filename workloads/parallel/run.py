"""Run one trial of a layout: set up the layout, train a few steps, and read back the layout that ran."""

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from workloads.api.contract import Infeasible, Machine, Measurement, Rank, Scalar
from workloads.api.steps import StepReports
from workloads.estimator.own_trainer import keeps_weights
from workloads.estimator.placed_job import PlacedJob
from workloads.hardware.cluster import UNKNOWN_CLUSTER
from workloads.instruments import device as devices
from workloads.instruments import process_setup
from workloads.instruments.distributed import process_group
from workloads.instruments.telemetry import GpuReadings, count_allocator_retries, monitor_gpu
from workloads.llama.attention import AttentionShape
from workloads.llama.data import load_sequences
from workloads.llama.experts import local_part
from workloads.llama.pytorch_attention import DocumentAttention, fastest_attention
from workloads.llama.sink_attention import find_sink_kernel
from workloads.models.flops import RecomputedLayer, hardware_flops_per_token, model_flops_per_token
from workloads.models.routing import executed_imbalance
from workloads.parallel import ParallelParameters, apply
from workloads.parallel.context import ContextAttention
from workloads.parallel.profiling import profile_step
from workloads.parallel.stage import ManualBackwardBlock, Stage, build_initializer
from workloads.parallel.train import Batch, TokenSource, Trainer, local_sequences
from workloads.precision.formats import require_torchao
from workloads.precision.layers import read_recipe
from workloads.tables import read_toml


@contextmanager
def collect_garbage(freq: int) -> Iterator[Callable[[int], None]]:
    """Collect Python's garbage every `freq` steps instead of automatically; if `freq` is 0, leave it to Python.

    A collection at a random time on one rank makes all other ranks wait. As in torchtitan's `GarbageCollection`
    (tools/utils.py), collections are calls of `gc.collect(1)`. In addition, all objects that exist before the first
    step are frozen, so no collection traverses the model and the imported modules. Yields a function to call at the
    start of each step.
    """

    def start_step(step: int) -> None:  # steps count from 0
        if step and step % freq == 0:
            gc.collect(1)

    if not freq:
        yield lambda step: None
        return
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield start_step
    finally:
        gc.enable()
        gc.unfreeze()


GIB = 2**30
RECOMPUTED: dict[str, list[RecomputedLayer]] = read_toml(__file__, "recomputed.toml")
DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32"}


def measure(parameters: ParallelParameters, rank: Rank) -> Measurement:
    """Train in this layout together with the other ranks, or each rank alone if the layout has one GPU.

    Raises Infeasible if the layout is invalid, torchao is missing or the device lacks support for the parameters.
    """
    device = devices.device_of(rank)
    if parameters.layout.gpus == 1:
        rank = replace(rank, rank=0, world_size=1, ranks_per_node=1)
    process_setup.keep_compiled_kernels()
    # As in torchtitan's run_train.sh. This must precede reading the architecture, which initializes CUDA.
    process_setup.enable_expandable_segments(device)
    kind, architecture = "cpu" if device.type == "cpu" else "gpu", devices.architecture(device)
    if violation := parameters.find_violation(Machine(kind, architecture, rank.world_size, rank.ranks_per_node)):
        raise Infeasible(violation.reason)
    layout = parameters.layout
    spec = apply.ModelSpec(
        parameters.shape,
        parameters.sequence_length,
        torch.float32 if parameters.dtype == "fp32" else torch.bfloat16,
        recipe="" if parameters.dtype in ("bf16", "fp32") else parameters.dtype,
        compiled=parameters.compile,
        state=parameters.state,
        block=parameters.block,
        document_tokens=parameters.document_tokens,
        routing=parameters.routing,
    )
    if spec.recipe and spec.block == "pytorch":
        require_torchao()
    devices.release_memory(device)
    torch.compiler.reset()
    try:
        kernel: AbstractContextManager[str] = nullcontext("")  # other blocks have their own kernel
        if spec.shape.gpt_oss:
            kernel = nullcontext(find_sink_kernel(device))
        elif layout.cp == 1 and not spec.document_tokens and spec.block == "pytorch":
            shape = AttentionShape.of_model(spec.shape, spec.sequence_length, spec.dtype, layout.tp)
            kernel = fastest_attention(shape, device)
        with kernel as name, process_group(rank, device):
            return _train(parameters, spec, rank, device, name)
    finally:
        devices.release_memory(device)


def _train(
    parameters: ParallelParameters, spec: apply.ModelSpec, rank: Rank, device: torch.device, sdpa_kernel: str
) -> Measurement:
    shape, layout, length = spec.shape, parameters.layout, parameters.sequence_length
    if parameters.async_tp:
        apply.separate_group_names(rank.sequence_number)
    groups = apply.build_groups(layout, device.type)
    initializer = build_initializer(parameters.seed, device, is_tied=shape.tied)
    stages = apply.build_stages(spec, layout, groups, device, initializer)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)  # so that the peak covers training, not weight initialization
    keeps = keeps_weights(PlacedJob(parameters.job, UNKNOWN_CLUSTER))
    trainer = Trainer(
        stages, layout, groups, device, parameters.learning_rate, clips=parameters.state == "fp32", keeps_weights=keeps
    )
    with monitor_gpu(device) as watch, collect_garbage(parameters.gc_freq) as collect:
        times_s, losses, communication, executed = _run_steps(parameters, trainer, collect, watch, rank)
    metrics = watch.metrics() | communication | {"loss": losses[-1], "first_loss": losses[0]}
    if shape.experts:
        metrics |= _measure_imbalance(trainer, shape.layers, device)
        tokens = layout.micro_batch * length // (layout.cp * layout.tp)
        measured = metrics["executed_imbalance"]
        executed["imbalance"] = executed_imbalance(parameters.imbalance, measured, shape, tokens)
    if trainer.gradient_norm is not None:
        metrics["gradient_norm"] = float(trainer.gradient_norm)
    if device.type == "cuda":
        metrics["peak_device_gib"] = _largest(torch.cuda.max_memory_allocated(device) / GIB, device)
        metrics["peak_reserved_gib"] = _largest(torch.cuda.max_memory_reserved(device) / GIB, device)
        if retries := _largest(count_allocator_retries() - watch.retries_before_steps, device):
            metrics["allocator_retries"] = retries
    tokens_per_step = layout.global_batch * length
    share = 1 / rank.world_size  # every rank does an equal share of the step's work
    attended = parameters.attended_length
    recomputed = dict.fromkeys(RECOMPUTED[parameters.checkpointing], layout.count_checkpointed(shape.layers))
    hardware_flops = hardware_flops_per_token(shape, attended, recomputed)
    return Measurement(
        executed=_executed_parameters(parameters, groups, trainer) | executed,
        step_times_s=tuple(times_s[parameters.warmup :]),
        flops_per_step=model_flops_per_token(shape, attended) * tokens_per_step * share,
        hardware_flops_per_step=hardware_flops * tokens_per_step * share,
        tokens_per_step=0 if rank.rank else tokens_per_step,  # rank 0 reports the tokens of all ranks
        # Attention and the head stay in bf16, so a mixed step has no meaningful share of the fp8 peak.
        matrix_dtype=parameters.dtype,
        energy=watch.energy(parameters.steps),
        metrics=metrics,
        machine_info=devices.machine_info(device)
        | watch.machine_info()
        | process_setup.describe_segments(device)
        | {
            "layout": str(layout),
            "attention": _attention_kernel(trainer.stages[0], sdpa_kernel),
            "parameters_kept": sum(local_part(p).numel() for stage in trainer.stages for p in stage.parameters()),
        }
        | apply.fp8_gathers(trainer.stages[0]),
    )


def _open_source(parameters: ParallelParameters) -> Callable[[int, range], Batch]:
    """Return a function that draws these sequences of a step's global batch: random ones, or a text's in order. Raises
    Infeasible if the file has too few tokens or tokens outside the vocabulary."""
    vocabulary, length, seed = parameters.shape.vocabulary, parameters.sequence_length, parameters.seed
    if parameters.data is None:
        return TokenSource(vocabulary, length, seed, parameters.document_tokens).draw
    count = parameters.global_batch * (parameters.warmup + parameters.steps)
    try:
        tokens = load_sequences(
            parameters.data, parameters.tokenizer, count=count, length=length + 1, vocabulary=vocabulary, seed=seed
        )
    except ValueError as error:
        raise Infeasible(str(error)) from error
    return lambda step, sequences: Batch(tokens[[step * parameters.global_batch + number for number in sequences]])


def _measure_imbalance(trainer: Trainer, layers: int, device: torch.device) -> dict[str, float]:
    """Return the busiest expert's tokens divided by the mean in the timed passes: mean and maximum over blocks; and the
    tokens of the busiest rank's experts divided by the mean, averaged over blocks (`Job.expert_imbalance`)."""
    blocks = {number: experts.imbalances for stage in trainer.stages for number, experts in stage.experts.items()}
    imbalances = [busiest for busiest, _ in blocks.values()]
    # Without a dtype, a pipeline rank without experts would add integers to the floats of other ranks.
    total = torch.tensor([sum(imbalances), len(imbalances)], dtype=torch.float32, device=device)
    most = torch.zeros(layers + 1, device=device)  # each block's busiest rank, then the worst expert
    most[layers] = max(imbalances, default=0.0)
    for number, (_, rank) in blocks.items():
        most[number] = rank
    dist.all_reduce(total)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    *ranks, worst = most[most > 0].tolist()
    executed = float(total[0] / total[1])
    return {"executed_imbalance": executed, "worst_imbalance": worst, "rank_imbalance": sum(ranks) / len(ranks)}


def _run_steps(
    parameters: ParallelParameters, trainer: Trainer, collect: Callable[[int], None], readings: GpuReadings, rank: Rank
) -> tuple[list[float], list[float], dict[str, float], dict[str, Scalar]]:
    """Train on new tokens in each step, and profile the last warm-up step. Tokens are drawn between steps, as the
    processes of a data loader would do; copying them to the device is timed. Returns the times and losses of all steps,
    the communication metrics, and the parameters as executed."""
    device, draw, reports = devices.device_of(rank), _open_source(parameters), StepReports(rank)
    sequences = local_sequences(trainer.layout, trainer.groups)
    tokens = parameters.global_batch * parameters.sequence_length
    flops = model_flops_per_token(parameters.shape, parameters.attended_length)
    times_s, losses, communication = list[float](), list[float](), dict[str, float]()
    for step in range(parameters.warmup + parameters.steps):
        batch = draw(step, sequences)
        if device.type == "cuda":
            batch = batch.map(Tensor.pin_memory)  # the host copies the batch without waiting
        if rank.reporter and step:  # rank 0 reports the step before, and all ranks end together
            endings: list[Exception | None] = [None]
            if rank.rank == 0:
                peak_bytes = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
                endings = [reports.report_training(times_s[-1], tokens, flops, peak_bytes, losses[-1])]
            dist.broadcast_object_list(endings, src=0)
            if endings[0]:
                raise endings[0]
        dist.barrier()
        if step == parameters.warmup:
            readings.begin_steps()
            for experts in (experts for stage in trainer.stages for experts in stage.experts.values()):
                experts.passes.zero_()
        started = time.perf_counter()
        collect(step)
        profiler: AbstractContextManager[None] = nullcontext()
        if step == parameters.warmup - 1:
            profiler = profile_step(device, communication, fused=parameters.async_tp, exchange=trainer.groups.ep_group)
        with profiler:
            losses.append(float(trainer.step(batch)))
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        times_s.append(time.perf_counter() - started)
    executed: dict[str, Scalar] = {
        "sequence_length": batch.tokens.shape[1] - 1,
        "steps": len(times_s) - parameters.warmup,
        "gc_freq": 0 if gc.isenabled() else parameters.gc_freq,
        **trainer.executed,
        "async_tp": any(name.startswith("calls_fused_") for name in communication),
    }
    return times_s, losses, communication, executed


def _largest(of_rank: float, device: torch.device) -> float:
    largest = torch.tensor(float(of_rank), device=device)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return float(largest)


def _executed_parameters(parameters: ParallelParameters, groups: apply.Groups, trainer: Trainer) -> dict[str, Scalar]:
    stages, block = trainer.stages, trainer.stages[0].first_block
    mesh, cp = groups.mesh, dist.get_world_size(groups.cp_group) if groups.cp_group is not None else 1
    recipe = block.block_math.recipe if isinstance(block, ManualBackwardBlock) else read_recipe(block.qkv)
    product_dtype = recipe or DTYPE_NAMES[apply.fsdp_dtypes(stages[0]).param_dtype or block.qkv.weight.dtype]
    # The types of weights, optimizer states and gradient reduction; several if they differ.
    reductions = {dtype for stage in stages if (dtype := apply.fsdp_dtypes(stage).reduce_dtype)}
    state_dtypes = sorted(DTYPE_NAMES[dtype] for dtype in trainer.state_dtypes() | reductions)
    executed: dict[str, Scalar] = {
        **vars(parameters),
        "dp_replicate": mesh["dp_replicate"].size(),
        "dp_shard": mesh["dp_shard_cp"].size() // cp,
        "tp": mesh["tp"].size(),
        "cp": cp,
        "document_tokens": getattr(block.attention, "document_tokens", 0),
        "cp_method": getattr(block.attention, "method", "allgather"),
        "pp": mesh["pp"].size(),
        "ep": groups.ep_group.size() if groups.ep_group is not None else 1,
        "stages_per_rank": len(stages),
        "dtype": product_dtype,
        "state": ", ".join(state_dtypes),
        "block": "manual" if isinstance(block, ManualBackwardBlock) else "pytorch",
    }
    # The requested checkpointing if all of this rank's blocks have it; otherwise the checkpointing of the blocks.
    blocks = {int(name): block for stage in stages for name, block in stage.blocks.items()}
    kinds = {number: getattr(block, "checkpointing", "none") for number, block in blocks.items()}
    if kinds != {number: parameters.layout.checkpointing_of(number) for number in blocks}:
        executed["checkpointing"] = ", ".join(sorted(set(kinds.values())))
    return executed


def _attention_kernel(stage: Stage, sdpa_kernel: str) -> str:
    """Return the name of the attention kernel, or of PyTorch's function and the kernel that it selects on a GPU."""
    block = stage.first_block
    if isinstance(block, ManualBackwardBlock):
        return block.block_math.kernel.name
    if isinstance(block.attention, DocumentAttention | ContextAttention):
        return block.attention.name
    if stage.shape.gpt_oss:
        return f"sinks ({sdpa_kernel})"
    return f"scaled_dot_product_attention ({sdpa_kernel})" if sdpa_kernel else "scaled_dot_product_attention"
