"""A trial of offloaded training: measure the machine, plan, train."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from workloads import device as devices
from workloads.api.contract import Infeasible, Measurement, Rank
from workloads.api.host import available_memory_bytes, node_activity
from workloads.api.recipes import unsupported_rate_reason
from workloads.llama import checkpoint
from workloads.llama.data import load_sequences
from workloads.llama.flops import hardware_flops_per_token, model_flops_per_token
from workloads.llama.shapes import MODELS, LlamaShape
from workloads.offload import OffloadParameters
from workloads.offload.cost_model import Budget, Model
from workloads.offload.device_rates import kernel_of, machine_rates
from workloads.offload.engine import Engine
from workloads.offload.memory import Arena
from workloads.offload.optimizer import AdamW
from workloads.offload.plan import AGAIN, GIB, trained_bytes
from workloads.offload.planner import Prediction, choose
from workloads.telemetry import monitor_gpu
from workloads.trace import record_trace

KEPT_AS_SAID = {
    "full": "all activations",
    "gate": "all but half of the MLP's activations",
    "projections": "all but the MLP's activations",
    "attention": "input and attention",
    "input": "input",
}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def measure(parameters: OffloadParameters, rank: Rank) -> Measurement:
    """Train under the fastest plan for the budgets. Raises Infeasible where none fits, before state is allocated."""
    device, dtype = devices.device_of(rank), DTYPES[parameters.dtype]
    if why := unsupported_rate_reason(parameters.dtype, devices.architecture(device)):
        raise Infeasible(f"dtype={parameters.dtype} is {why}")
    devices.release_memory(device)
    shape = MODELS[parameters.model]
    if device.type == "cpu":
        _require_room_on_a_cpu(shape, dtype)
    if parameters.checkpoint:
        checkpoint.open_reader(Path(parameters.checkpoint), shape)  # a wrong one is said before anything is measured
    master_weights = parameters.master_weights and dtype != torch.float32
    model = Model(shape, dtype.itemsize, 12 if master_weights else 2 * dtype.itemsize)
    torch.compiler.reset()  # what a process compiled for earlier trials counts against what it may compile at all
    if device.type == "cuda" and not torch.version.hip:
        torch.cuda.memory._set_allocator_settings("expandable_segments:True")  # or a tight budget is lost in pieces
    with _device_budget(device, parameters.device_gib):
        rates = machine_rates(parameters.model, parameters.sequence_length, device, dtype, master_weights)
        devices.release_memory(device)
        budget = Budget(parameters.device_gib, parameters.host_gib)
        predicted = choose(model, parameters.sequence_length, parameters.sequences_per_step, budget, rates)
        print("\n".join(said(predicted)), flush=True)
        with Arena(math.ceil(predicted.host_bytes) + (len(predicted.plan.layers) + 8) * 4096, device) as arena:
            return _train(parameters, shape, predicted, arena, device, dtype, master_weights)


def _require_room_on_a_cpu(shape: LlamaShape, dtype: torch.dtype) -> None:
    """There the device's memory is the host's: what cannot train in it at all is said before anything is tried."""
    needed, available = trained_bytes(shape, dtype.itemsize), available_memory_bytes()
    if needed > available:
        raise Infeasible(
            f"weights, gradients and states are {needed / GIB:.1f} GiB, this machine has {available / GIB:.1f} left, "
            "and no GPU: workload=llama_tiny is for a CPU"
        )


def _train(
    parameters: OffloadParameters,
    shape: LlamaShape,
    predicted: Prediction,
    arena: Arena,
    device: torch.device,
    dtype: torch.dtype,
    master_weights: bool,
) -> Measurement:
    plan = predicted.plan
    optimizer = AdamW(learning_rate=parameters.learning_rate)
    count = parameters.warmup + parameters.steps
    text = load_sequences(
        parameters.data,
        parameters.tokenizer,
        count=count * parameters.sequences_per_step,
        length=plan.sequence_length + 1,
        vocabulary=shape.vocabulary,
        seed=parameters.seed,
    )
    batches = text.view(count, plan.rounds, plan.groups, plan.sequences, plan.sequence_length + 1)
    kernel = kernel_of(shape, plan.sequence_length, device, dtype)
    engine = Engine(shape, plan, arena, device, kernel, dtype=dtype, master_weights=master_weights, optimizer=optimizer)
    if parameters.checkpoint:
        engine.load(checkpoint.open_reader(Path(parameters.checkpoint), shape))
    else:
        engine.load_random(parameters.seed)
    times_s, losses, busy = [], [], node_activity()
    with monitor_gpu(device) as watch:
        for batch in batches:
            started = time.perf_counter()
            losses.append(float(engine.step(batch)))
            engine.synchronize()
            times_s.append(time.perf_counter() - started)
            spent_s = engine.queues.spent_s()
    if not all(math.isfinite(loss) for loss in losses):
        raise ArithmeticError(f"the loss became {losses[-1]} within {len(losses)} steps")
    copied_bytes = engine.queues.copied_bytes
    if parameters.save_to:
        checkpoint.save(Path(parameters.save_to), shape, engine.weights())
    files = {"trace.json.gz": record_trace(lambda: engine.step(batches[-1]))} if parameters.profile else {}
    tokens = plan.tokens_per_step
    keeps = Counter(layer.keeps for layer in plan.layers)
    metrics = watch.metrics() | {
        "loss": losses[-1],
        "first_loss": losses[0],
        "predicted_tokens_per_s": tokens / predicted.times.step_s,
        "predicted_copy_wait_share": predicted.times.waiting_s / predicted.times.step_s,
        "peak_host_gib": arena.used / GIB,
        "copy_wait_share": spent_s.get("copy_wait", 0.0) / times_s[-1],
        "optimizer_share": spent_s.get("optimizer", 0.0) / times_s[-1],
        "copied_gib_per_step": copied_bytes / count / GIB,
        "rounds": float(plan.rounds),
    }
    if device.type == "cuda":
        metrics["peak_device_gib"] = torch.cuda.max_memory_reserved(device) / GIB
    return Measurement(
        executed={name: getattr(parameters, name) for name in parameters.__dataclass_fields__}
        | {"sequences_per_step": tokens // plan.sequence_length, "steps": len(times_s) - parameters.warmup},
        step_times_s=tuple(times_s[parameters.warmup :]),
        flops_per_step=model_flops_per_token(shape, plan.sequence_length) * tokens,
        hardware_flops_per_step=hardware_flops_per_token(
            shape,
            plan.sequence_length,
            {layer: sum(keeps[kind] for kind in kinds) for layer, kinds in AGAIN.items()},
        )
        * tokens,
        tokens_per_step=tokens,
        matrix_dtype=parameters.dtype,
        metrics=metrics,
        machine_info=devices.machine_info(device)
        | watch.machine_info()
        | {"plan": "; ".join(said(predicted)), "attention": kernel.name}
        | busy,
        files=files,
    )


def said(predicted: Prediction) -> list[str]:
    """The plan in a few lines."""
    plan = predicted.plan
    kinds = Counter(
        f"{p.weights} weights, {p.states} states, {KEPT_AS_SAID[p.keeps]} kept on the {p.kept_on}" for p in plan.layers
    )
    of = f" in {plan.pieces} pieces each" if plan.pieces > 1 else ""
    return [
        f"{plan.rounds} rounds of {plan.groups} x {plan.sequences} sequences of {plan.sequence_length} tokens{of}",
        *(f"{count} layers: {kind}" for kind, count in kinds.items()),
        f"embedding and head: states on the {plan.ends_states}",
        f"device {predicted.device_bytes / GIB:.2f} GiB, host {predicted.host_bytes / GIB:.2f} GiB",
        f"{predicted.times.step_s:.3g} s a step, {predicted.times.waiting_s:.3g} s of it waiting for copies",
    ]


@contextmanager
def _device_budget(device: torch.device, gib: float) -> Iterator[None]:
    """The allocator's own limit: past it is an out-of-memory error."""
    if device.type == "cpu":
        yield
        return
    total = torch.cuda.get_device_properties(device).total_memory
    if gib * GIB > total:
        raise Infeasible(f"device_gib={gib:g}: this GPU has {total / GIB:.1f}")
    torch.cuda.set_per_process_memory_fraction(gib * GIB / total, device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
