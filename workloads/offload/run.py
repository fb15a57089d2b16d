"""A trial of offloaded training: measure the device's rates, choose a plan, train."""

import math
import statistics
import time
from collections import Counter, deque
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist

from workloads.api.contract import Infeasible, Measurement, Rank, Scalar
from workloads.api.errors import first_line
from workloads.api.host import available_memory_bytes, node_activity
from workloads.api.notices import notify
from workloads.api.steps import StepReports
from workloads.instruments import device as devices
from workloads.instruments import process_setup
from workloads.instruments.distributed import process_group
from workloads.instruments.telemetry import GpuReadings, count_allocator_retries, monitor_gpu
from workloads.instruments.trace import record_trace
from workloads.llama import checkpoint
from workloads.llama.attention_kernels import KERNELS
from workloads.llama.data import load_sequences
from workloads.llama.fp8_block import FP8_RECIPES
from workloads.models.flops import hardware_flops_per_token, model_flops_per_token
from workloads.models.model import find_trained_name
from workloads.models.routing import executed_imbalance
from workloads.offload import OffloadParameters, find_placement_problem, infeasible_reason
from workloads.offload.catalogue_rates import model_sizes
from workloads.offload.cost_model import MemoryBudget
from workloads.offload.device_rates import MeasuredDevice, load_or_measure, measure_together
from workloads.offload.engine import Engine
from workloads.offload.gang import Gang
from workloads.offload.host_memory import ALIGNMENT_BYTES, Arena
from workloads.offload.optimizer import AdamW, Precision
from workloads.offload.peer_copies import CudaDriver, GangOutOfMemory, agree
from workloads.offload.plan import GIB, SAVED_ACTIVATIONS_TEXT, count_training_state_bytes, recomputed_under
from workloads.offload.plan_search import Prediction, find_fastest_plan

# The memory of a GPU's process and its compilers besides pinned memory. Two processes training 70B took 12 GiB. With
# 235.7 of 247 available GiB pinned, the kernel killed one process, so each gets 1 GiB more (offload_70b_h200.md).
PROCESS_GIB = 7.0
SMALLER_PLAN = 0.95  # of the device's budget, for the plan after one that ran out of memory
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32} | dict.fromkeys(FP8_RECIPES, torch.bfloat16)


def measure(parameters: OffloadParameters, rank: Rank) -> Measurement:
    """Train with the fastest plan within the budgets. If memory runs out, retry once with a smaller plan.

    Raises Infeasible, before state is allocated, if no plan fits or this device cannot train the model. Raises
    ArithmeticError if the loss is not finite.
    """
    started_s = {"": time.perf_counter()}  # when each part of the startup ended
    process_setup.keep_compiled_kernels()
    device = devices.device_of(rank)
    process_setup.enable_expandable_segments(device)  # without them, fragmentation uses up a small budget
    if problem := find_placement_problem(parameters.distribution, rank.world_size, rank.ranks_per_node):
        raise Infeasible(problem[0])
    precision = select_precision(parameters, devices.architecture(device))
    devices.release_memory(device)
    shape, model = parameters.shape, model_sizes(parameters, rank.world_size)
    if device.type == "cpu":  # device memory is host memory
        needed = count_training_state_bytes(shape, model.element_bytes, model.state_bytes_per_parameter)
        if needed > (available := available_memory_bytes()):
            raise Infeasible(
                f"weights, gradients and optimizer states need {needed / GIB:.1f} GiB, this machine has no GPU and "
                f"{available / GIB:.1f} GiB available. Use workload=llama_tiny on a CPU"
            )
    if parameters.checkpoint:
        checkpoint.open_reader(Path(parameters.checkpoint), shape)  # rejects a wrong checkpoint before measuring
    torch.compiler.reset()  # compilations of earlier trials in this process count toward the recompilation limit
    group = process_group(rank, device) if rank.world_size > 1 else nullcontext()
    with process_setup.device_memory_limit(device, parameters.device_gib), group:
        measured = load_or_measure(parameters.model, parameters.sequence_length, device, precision, parameters.routing)
        if rank.world_size > 1:
            measured = measure_together(measured, device)
        devices.release_memory(device)
        started_s["rates"] = time.perf_counter()
        training = (parameters, measured, started_s, rank)
        try:
            return _plan_and_train(parameters.device_gib, *training)
        except torch.OutOfMemoryError as error:
            if rank.world_size > 1 and not isinstance(error, GangOutOfMemory):  # the other ranks wait for this one
                raise
            reason = first_line(error)
        # This is outside the handler, where the error no longer holds the engine's tensors.
        devices.release_memory(device)
        smaller_gib = SMALLER_PLAN * parameters.device_gib
        notify(f"plan again for {smaller_gib:.2f} GiB: {reason}")
        measurement = _plan_and_train(smaller_gib, *training)
        return replace(
            measurement,
            metrics={**measurement.metrics, "replanned_device_gib": smaller_gib},
            machine_info={**measurement.machine_info, "out_of_memory": reason},
        )


def _plan_and_train(
    device_gib: float, parameters: OffloadParameters, measured: MeasuredDevice, started_s: dict[str, float], rank: Rank
) -> Measurement:
    """Train with the fastest plan for `device_gib`. Raises torch.OutOfMemoryError if this needs more than planned."""
    device, model = devices.device_of(rank), model_sizes(parameters, rank.world_size)
    budget = MemoryBudget(device_gib, parameters.host_gib)
    length, sequences = parameters.sequence_length, parameters.sequences_per_step
    prediction = find_fastest_plan(model, length, sequences, budget, measured.rates)
    if rank.rank == 0:
        notify("\n".join(describe_plan(prediction)))
    started_s["plan"] = time.perf_counter()
    # Each allocation is aligned to 512 bytes: a chunk has at most eight tensors, and a layer a dozen vectors. The
    # padding of shares takes the same amount again.
    chunks_on_host = sum(location == "host" for _, location in prediction.plan.list_activations())
    alignment_bytes = (8 * chunks_on_host + 32 * (model.shape.layers + 1)) * ALIGNMENT_BYTES
    arena_bytes = math.ceil(prediction.host_bytes) + alignment_bytes
    if rank.world_size > 1:
        dist.barrier()  # every rank has released the memory of an earlier plan
        check_host_memory(arena_bytes, rank.world_size, device.type, available_memory_bytes())
        dist.barrier()  # no rank allocates its part before all ranks have checked
    with Arena(arena_bytes, device) as arena:
        started_s["host memory"] = time.perf_counter()
        return _train(parameters, prediction, measured, arena, started_s, rank)


def check_host_memory(arena_bytes: int, ranks: int, device_type: str, available_bytes: int) -> None:
    """Raise Infeasible if a host has too little memory for the arenas of all ranks and their processes."""
    arenas_gib, available_gib = arena_bytes * ranks / GIB, available_bytes / GIB
    beside_gib = PROCESS_GIB * ranks if device_type == "cuda" else 0.0
    if arenas_gib + beside_gib > available_gib:
        raise Infeasible(
            f"the plan pins {arenas_gib:.1f} GiB of host memory for {ranks} GPUs, their processes take about "
            f"{beside_gib:g} GiB more, and {available_gib:.1f} GiB are available: set host_gib to at most "
            f"{max(0, math.floor(available_gib - beside_gib))}"
        )


def select_precision(parameters: OffloadParameters, architecture: str) -> Precision:
    """Return the data types to train with. Raises Infeasible if the device, sequences or packages do not allow it."""
    if reason := infeasible_reason(parameters.dtype, parameters.sequence_length, architecture, parameters.shape):
        raise Infeasible(reason)
    if parameters.optimizer_states == "int8" and find_spec("torchao") is None:
        raise Infeasible("optimizer_states=int8 needs the package torchao: pip install 'gpu-sweeper[precision]'")
    dtype = DTYPES[parameters.dtype]
    return Precision(
        dtype,
        master_weights=parameters.master_weights == "fp32" and dtype != torch.float32,
        recipe=parameters.dtype if parameters.dtype in FP8_RECIPES else "",
        optimizer_states=parameters.optimizer_states,
    )


def _train(
    parameters: OffloadParameters,
    prediction: Prediction,
    measured: MeasuredDevice,
    arena: Arena,
    started_s: dict[str, float],
    rank: Rank,
) -> Measurement:
    device, plan, shape, warmup = devices.device_of(rank), prediction.plan, parameters.shape, parameters.warmup
    precision = select_precision(parameters, devices.architecture(device))
    optimizer = AdamW(learning_rate=parameters.learning_rate, rounding=parameters.rounding or "nearest")
    steps = warmup + parameters.steps
    tokens = load_sequences(
        parameters.data,
        parameters.tokenizer,
        count=steps * parameters.sequences_per_step,
        length=plan.sequence_length + 1,
        vocabulary=shape.vocabulary,
        seed=parameters.seed,
    )
    division = (plan.accumulation_rounds, plan.groups_per_round, plan.sequences_per_chunk)
    driver = CudaDriver(device) if measured.rates.peer_copy_s_per_byte else None
    gang = Gang(prediction.model.distribution, rank.world_size, rank.rank, driver)
    batches = list(tokens.view(steps, gang.batches, *division, -1)[:, rank.rank % gang.batches])
    batches[:warmup] = [batch[: parameters.warmup_rounds] for batch in batches[:warmup]]
    own_tokens = len(gang.list_own(plan.tokens_per_step))  # this rank's share of a ring's tokens
    engine = Engine(
        shape,
        plan,
        arena,
        device,
        KERNELS[measured.attention],
        precision=precision,
        optimizer=optimizer,
        routing=parameters.routing,
        gang=gang,
    )
    if parameters.checkpoint:
        engine.load(checkpoint.open_reader(Path(parameters.checkpoint), engine.shape))
    else:
        engine.initialize(parameters.seed)
    activity = node_activity()
    allocator_gib = parameters.device_gib - engine.peer_bytes / GIB
    with process_setup.device_memory_limit(device, allocator_gib):
        if rank.world_size > 1:
            try:
                agree(lambda: engine.rehearse(batches[0][0]))
            except GangOutOfMemory:  # on all ranks
                engine.close()
                raise
        started_s["weights" if rank.world_size == 1 else "weights and rehearsal"] = time.perf_counter()
        with monitor_gpu(device) as readings:
            times_s, losses, span_times_s = _run_steps(engine, batches, warmup, readings, rank)
            retries = count_allocator_retries() - readings.retries_before_steps
    # Read before the extra step for the trace.
    copied_bytes, exchanged_bytes = engine.copy_streams.copied_bytes, engine.copy_streams.exchanged_bytes
    if parameters.save_to:
        weights = engine.copy_weights()
        if rank.rank == 0:
            checkpoint.save(Path(parameters.save_to), shape, weights)
        deque(weights, maxlen=0)  # every rank takes part in gathering weights
    files, part_shares = dict[str, bytes](), dict[str, float]()
    if parameters.profile:
        files["trace.json.gz"], part_shares = record_trace(lambda: engine.step(batches[-1]))
    parts_s = {name: end_s - begin_s for (_, begin_s), (name, end_s) in pairwise(started_s.items())}
    predicted, step_s = prediction.times, times_s[-1]
    parts_s["first step"] = times_s[0] - len(batches[0]) / len(batches[-1]) * statistics.median(times_s[warmup:])
    metrics = readings.metrics() | part_shares
    metrics |= {
        "loss": losses[-1],
        "first_loss": losses[0],
        "predicted_tokens_per_s": plan.tokens_per_step * gang.batches / predicted.step_s,
        "predicted_copy_wait_share": predicted.copy_wait_s / predicted.step_s,
        "copy_wait_share": span_times_s.get("copy_wait", 0.0) / step_s,
        "optimizer_share": span_times_s.get("optimizer", 0.0) / step_s,
        "rounds": float(plan.accumulation_rounds),
        "peak_host_gib": arena.used_bytes * rank.world_size / GIB,
        "startup_s": sum(parts_s.values()),
        "copied_gib_per_step": copied_bytes / parameters.steps / GIB,
        "exchanged_gib_per_step": exchanged_bytes / parameters.steps / GIB,
    }
    chunk_counts = Counter(plan.list_activations())
    recompute = {
        operation: sum(n for (saved, _), n in chunk_counts.items() if saved in choices) / plan.chunks_per_round
        for operation, choices in recomputed_under(shape).items()
    }
    if retries:
        metrics["allocator_retries"] = float(retries)
    if (imbalance := engine.imbalance) is not None:
        metrics["executed_imbalance"] = imbalance
    if device.type == "cuda":
        metrics["peak_device_gib"] = engine.peak_device_bytes() / GIB
    engine.close()
    return Measurement(
        executed=_executed_parameters(parameters, engine, batches, len(times_s) - warmup),
        step_times_s=tuple(times_s[warmup:]),
        flops_per_step=model_flops_per_token(shape, plan.sequence_length) * own_tokens,
        hardware_flops_per_step=hardware_flops_per_token(shape, plan.sequence_length, recompute) * own_tokens,
        tokens_per_step=own_tokens,
        matrix_dtype=parameters.dtype,
        energy=readings.energy(len(times_s) - warmup),
        metrics=metrics,
        machine_info=devices.machine_info(device)
        | readings.machine_info()
        | {
            "plan": "; ".join(describe_plan(prediction)),
            "startup": ", ".join(f"{name} {seconds:.1f} s" for name, seconds in parts_s.items()),
            "distribution": prediction.model.distribution or "one GPU",
            "exchange": "copies" if engine.peer_bytes else "collectives" if gang.is_sharded else "none",
            "attention": measured.attention,
            "rates_age_s": round(max(0.0, time.time() - measured.measured_at)),
        }
        | engine.describe_types()
        | arena.placement
        | process_setup.describe_segments(device)
        | activity,
        files=files,
    )


def _executed_parameters(
    parameters: OffloadParameters, engine: Engine, batches: list[torch.Tensor], steps: int
) -> dict[str, Scalar]:
    """Return the executed parameters, read back from the engine and the tokens, except budgets, files and the seed."""
    types, dtype = engine.describe_types(), engine.matrix_dtype
    *sequences, length = batches[-1].shape
    distribution = engine.gang.distribution if parameters.distribution else None
    warmup_rounds = len(batches[0]) if parameters.warmup and parameters.warmup_rounds else parameters.warmup_rounds
    if warmup_rounds == len(batches[-1]):  # all rounds of a step, which may be fewer than requested
        warmup_rounds = max(warmup_rounds, parameters.warmup_rounds or 0)
    return {
        **vars(parameters),
        "model": find_trained_name(engine.shape),
        "sequence_length": length - 1,
        "sequences_per_step": math.prod(sequences) * engine.gang.batches,
        "distribution": distribution,
        "dtype": dtype,
        "imbalance": executed_imbalance(parameters.imbalance, engine.imbalance, engine.shape, engine.plan.chunk_tokens),
        # Weights in fp32 need no copies in fp32.
        "master_weights": parameters.master_weights if dtype == "fp32" else types["type_of_master_weights"],
        "optimizer_states": types["type_of_optimizer_states"] if parameters.optimizer_states else None,
        "rounding": engine.optimizer.rounding if parameters.rounding else None,
        "warmup_rounds": warmup_rounds,
        "steps": steps,
        "learning_rate": engine.optimizer.learning_rate,
    }


def _run_steps(
    engine: Engine, batches: list[torch.Tensor], warmup: int, readings: GpuReadings, rank: Rank
) -> tuple[list[float], list[float], Mapping[str, float]]:
    """Train one step on each batch. Return the times and losses of all steps, and the time of each kind of work in the
    last step. Raises Pruned, TrialTimeout or, if a loss is not finite, ArithmeticError."""
    times_s, losses, reports = [], [], StepReports(rank)
    span_times_s: Mapping[str, float] = {}
    flops = model_flops_per_token(engine.shape, engine.plan.sequence_length)
    for number, batch in enumerate(batches):
        if number == warmup:
            readings.begin_steps()
            engine.copy_streams.copied_bytes = engine.copy_streams.exchanged_bytes = 0
        started = time.perf_counter()
        losses.append(float(engine.step(batch)))
        engine.synchronize()
        times_s.append(time.perf_counter() - started)
        span_times_s = engine.copy_streams.take_span_times_s()
        peak_bytes = engine.peak_device_bytes()
        endings: list[Exception | None] = [None]
        if rank.rank == 0:
            tokens = batch[..., 1:].numel() * engine.gang.batches
            endings = [reports.report_training(times_s[-1], tokens, flops, peak_bytes, losses[-1])]
        if rank.world_size > 1:  # all ranks must end after the same step
            dist.broadcast_object_list(endings, src=0)
        if endings[0]:
            engine.close()  # in all ranks, whose processes run the next trial
            raise endings[0]
    if not all(math.isfinite(loss) for loss in losses):
        raise ArithmeticError(f"the loss is {losses[-1]} after {len(losses)} steps")
    return times_s, losses, span_times_s


def describe_plan(prediction: Prediction) -> list[str]:
    """Return the plan and its prediction as a few lines of text."""
    plan = prediction.plan
    layers = Counter((layer.weights, layer.optimizer_states) for layer in plan.layers).items()
    chunk_counts = Counter(plan.list_activations())
    segments = ""
    if plan.segments_per_sequence > 1:
        segments = f" in {plan.segments_per_sequence} segments each, keys and values on the {plan.keys_values_on}"
    model = prediction.model
    each = f" on each of {model.gpus} GPUs, {model.distribution}" if model.gpus > 1 else ""
    return [
        f"{plan.accumulation_rounds} rounds of {plan.groups_per_round} x {plan.sequences_per_chunk} sequences of "
        f"{plan.sequence_length} tokens{segments}",
        *(f"{count} layers: {weights} weights, {states} optimizer states" for (weights, states), count in layers),
        *(
            f"{count / chunk_counts.total():.3g} of chunks: {SAVED_ACTIVATIONS_TEXT[saved]} saved on the {location}"
            for (saved, location), count in chunk_counts.items()
        ),
        f"embedding and LM head: optimizer states on the {plan.embedding_and_head_states}",
        f"device {prediction.device_bytes / GIB:.2f} GiB, host {prediction.host_bytes / GIB:.2f} GiB{each}",
        f"{prediction.times.step_s:.3g} s per step, {prediction.times.copy_wait_s:.3g} s of it waiting for copies",
    ]
