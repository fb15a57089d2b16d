"""The device's rates for a model, measured in a few seconds before a plan is chosen.

A GPU's rates and attention kernel are cached for a day across the trials, processes and sweeps of one machine.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from workloads.api.host import version_of
from workloads.instruments import device as devices
from workloads.instruments.process_setup import cache_folder
from workloads.instruments.timing import run_for, time_in_turns
from workloads.llama.attention import AttentionShape, fastest_kernel
from workloads.llama.attention_kernels import KERNELS, Kernel
from workloads.llama.block import Activations, BlockMath, NamedTensors
from workloads.llama.fp8_block import build_block_math
from workloads.llama.model import Block, loss_and_gradients, rope_table
from workloads.models.model import MODELS, Model
from workloads.models.routing import NATURAL, Routing
from workloads.offload.cost_model import DeviceRates
from workloads.offload.host_memory import Arena
from workloads.offload.optimizer import AdamW, Precision
from workloads.offload.peer_copies import open_peer_memory
from workloads.offload.plan import LOGIT_TOKENS, SAVED_ACTIVATIONS, SAVED_TENSORS, SavedActivations

TIMED_CHUNK_TOKENS = {"cuda": 8192, "cpu": 64}  # the minimum number of tokens in the timed chunk
EXPERTS_CHUNKS = 4  # factor on this number for mixtures of experts, whose GEMMs are slow for few rows
SETTLING_S = {"cuda": 6.0, "cpu": 0.0}  # clocks fall within seconds of load, and rates are measured under load
SHORT_SETTLING_S = {"cuda": 1.0, "cpu": 0.0}
SPLIT_READINGS = 3  # per segment length

KEPT_FOR_S = 24 * 3600
PACKAGES = ("triton", "flash-attn-4", "flash-attn", "amd-aiter", "torchao")
# Environment variables with these prefixes can change a GPU's rates; trials set some of them (space.env).
ENVIRONMENT = ("AITER_", "CUBLAS", "CUDA_", "GPU_", "HIP", "HSA_", "MIOPEN_", "PYTORCH_", "ROC", "TORCH", "TRITON_")
# The environment at startup. PyTorch's compiler later adds the paths of its tools (Inductor's compile_tasks.py), which
# would make every process measure twice.
FOUND_ENVIRONMENT = sorted(item for item in os.environ.items() if item[0].startswith(ENVIRONMENT))


@dataclass(frozen=True)
class MeasuredDevice:
    """The measurements that a plan is based on."""

    rates: DeviceRates
    attention: str  # the name of the fastest attention kernel
    measured_at: float  # Unix time in seconds


def load_or_measure(
    model: str, sequence_length: int, device: torch.device, precision: Precision, routing: Routing = NATURAL
) -> MeasuredDevice:
    """Return this GPU's measurements from the last day, or measure now. A CPU is measured anew in each process.

    Measurements are reused for the same GPU, model, length, precision, power limit, versions and environment variables.
    """

    def measure() -> MeasuredDevice:
        rates = measure_device_rates(model, sequence_length, device, precision, routing)
        kernel = select_attention_kernel(MODELS[model], sequence_length, device, precision.dtype)
        return MeasuredDevice(rates, kernel.name, time.time())

    folder = cache_folder("rates") if device.type == "cuda" else None
    if folder is None:
        return measure()
    code = [
        file.read_bytes()
        for name in ("offload", "llama", "models")
        for file in sorted((Path(__file__).parents[1] / name).iterdir())
        if file.suffix in (".py", ".csv", ".toml")
    ]
    key = devices.machine_info(device) | {
        "model": model,
        "length": sequence_length,
        "precision": precision,
        "routing": routing,
        "versions": [version_of(package) for package in PACKAGES],
        "environment": FOUND_ENVIRONMENT,
        "code": hashlib.sha256(b"".join(code)).hexdigest(),
    }
    return keep(folder, key, measure)


def keep(folder: Path, key: Mapping[str, object], measure: Callable[[], MeasuredDevice]) -> MeasuredDevice:
    """Return the folder's entry for a key if it is less than a day old; otherwise, measure and store a new entry."""
    file = folder / f"{hashlib.sha256(repr(sorted(key.items())).encode()).hexdigest()[:32]}.json"
    try:
        kept = json.loads(file.read_text())
        measured = MeasuredDevice(DeviceRates(**kept["rates"]), kept["attention"], float(kept["measured_at"]))
        if 0 <= time.time() - measured.measured_at < KEPT_FOR_S and measured.attention in KERNELS:
            return measured
    except (OSError, ValueError, KeyError, TypeError):  # absent, or not written by this version
        pass
    measured = measure()
    temporary = file.with_suffix(f".{os.getpid()}")
    try:
        temporary.write_text(json.dumps(asdict(measured)))
        temporary.replace(file)  # a reader sees the whole file or none
    except OSError:  # for example, a full disk: the next process measures again
        temporary.unlink(missing_ok=True)
    return measured


def measure_together(measured: MeasuredDevice, device: torch.device) -> MeasuredDevice:
    """Return the measurements of the group's slowest process, with the rates of copies and links under concurrent use.

    Shares are exchanged by copies or by collectives, whichever is faster. If the links between GPUs reach less than
    twice the rate of a host copy, the GPUs are assumed to communicate over their links to the host.
    """
    dist.barrier()  # one process may have read its other rates from a file
    ranks, rank, copy_s = dist.get_world_size(), dist.get_rank(), _measure_copies(device)
    whole = torch.zeros((1 << 28 if device.type == "cuda" else 1 << 20) // ranks * ranks, device=device)
    own = whole.new_zeros(whole.numel() // ranks)

    def measure(gather: Callable[[], object]) -> float:
        times_s = []
        for _ in range(6):
            dist.barrier()
            started = time.perf_counter()
            gather()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times_s.append(time.perf_counter() - started)
        return statistics.median(times_s) / (whole.nbytes - own.nbytes)

    link_s, peer_s = measure(lambda: dist.all_gather_into_tensor(whole, own)), math.inf
    if peers := open_peer_memory(device, whole.dtype, [whole.numel()]):
        share = peers.tensors[0].chunk(ranks)[rank]
        peer_s = measure(lambda: peers.push([(n, share, share) for n in range(ranks) if n != rank]))
        peers.close()
    sum_s = _measure_medians_s([lambda: own.add_(whole[: own.numel()])], device)[0] / own.nbytes
    slowest = torch.tensor([copy_s, link_s, peer_s, sum_s], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    copy_s, link_s, peer_s, sum_s = slowest.tolist()
    of_all: list[Any] = [None] * ranks
    dist.all_gather_object(of_all, measured)
    measured = max(of_all, key=lambda one: one.rates.backward_s_per_token)
    together = {"h2d_s_per_byte": copy_s, "d2h_s_per_byte": copy_s, "link_s_per_byte": link_s, "sum_s_per_byte": sum_s}
    if peer_s < link_s:
        together["peer_copy_s_per_byte"] = peer_s
    by_host = min(link_s, peer_s) > copy_s / 2
    return replace(measured, rates=replace(measured.rates, **together, links_are_the_hosts=by_host))


def select_attention_kernel(shape: Model, sequence_length: int, device: torch.device, dtype: torch.dtype) -> Kernel:
    return fastest_kernel(AttentionShape.of_model(shape, sequence_length, dtype), device)


@cache
def measure_device_rates(
    model: str, sequence_length: int, device: torch.device, precision: Precision, routing: Routing = NATURAL
) -> DeviceRates:
    """Measure the rates for a model and sequence length, once per process for the same arguments.

    A long sequence is timed at its middle segment, which has the average number of tokens before it. The workspace is
    measured at the last segment, which needs the most, and for experts with fewer tokens than are timed: the estimate
    is then high enough for what PyTorch reserves.
    """
    shape, dtype = MODELS[model], precision.dtype
    length = min(sequence_length, TIMED_CHUNK_TOKENS[device.type])
    tokens = max(1, TIMED_CHUNK_TOKENS[device.type] // sequence_length) * length
    tokens_before_last = sequence_length - length
    kernel = select_attention_kernel(shape, sequence_length, device, dtype)
    block_math = build_block_math(shape, kernel, precision.recipe, compiled=device.type != "cpu", routing=routing)
    split_forward_s = split_backward_s = 0.0
    with torch.no_grad():
        state = _BlockState.draw(block_math, device, dtype)
        passes, saved_bytes = _build_passes(state, tokens, length, tokens_before_last or None)
        # A CPU reports no peak, so this is a conservative estimate.
        workspace_bytes = (_measure_peak_bytes(passes[-1], device) or 3.0 * saved_bytes) / tokens
        if tokens_before_last or shape.experts:
            del passes
            tokens *= EXPERTS_CHUNKS if shape.experts else 1
            passes, _ = _build_passes(state, tokens, length, tokens_before_last // 2 or None)
        run_for(SETTLING_S[device.type], passes, device)
        forward_s, *backward_s = _measure_medians_s(passes, device)
        del passes
        if tokens_before_last:
            split_forward_s, split_backward_s = _measure_split(state, sequence_length, length)
        del state
        cast_s, sum_s = _measure_weight_passes(block_math, device, precision)
    by_choice = dict(zip(SAVED_ACTIVATIONS, backward_s, strict=True))
    # With few tokens, sums take nearly all of experts' backward passes. The rest computes twice the forward GEMMs.
    least_s = max(by_choice["full"] - sum_s, forward_s)
    copy_s_per_byte = _measure_copies(device)
    return DeviceRates(
        forward_s_per_token=forward_s / tokens,
        backward_s_per_token=least_s / tokens,
        recompute_s_per_token={saved: max(0.0, s - by_choice["full"]) / tokens for saved, s in by_choice.items()},
        lm_head_s_per_token=_measure_lm_head(shape, device, dtype),
        h2d_s_per_byte=copy_s_per_byte,
        d2h_s_per_byte=copy_s_per_byte,
        optimizer_s_per_byte=_measure_optimizer(device, precision),
        workspace_bytes_per_token=workspace_bytes,
        min_chunk_tokens=TIMED_CHUNK_TOKENS[device.type],
        weight_cast_s=cast_s,
        gradient_sum_s=sum_s,
        split_forward_s_per_token=split_forward_s,
        split_backward_s_per_token=split_backward_s,
    )


def _measure_medians_s(steps: list[Callable[[], object]], device: torch.device) -> list[float]:
    times_s = time_in_turns(steps, device, warmup=2, repeats=5, cold_cache=False)
    return [statistics.median(step_times_s) for step_times_s in times_s]


def _measure_split(state: _BlockState, sequence_length: int, segment: int) -> tuple[float, float]:
    """Return the seconds per token that another segment of a sequence adds to each pass of a block. Segments of this
    length are compared with segments twice as long, or half as long if memory is short."""
    try:
        return _compare_segments(state, sequence_length, min(2 * segment, sequence_length), segment)
    except torch.OutOfMemoryError:
        pass  # the exception keeps the tensors alive until here
    devices.release_memory(state.device)
    return _compare_segments(state, sequence_length, segment, segment // 2)


def _compare_segments(state: _BlockState, sequence_length: int, longer: int, shorter: int) -> tuple[float, float]:
    """Return the seconds per token that each additional segment adds to both passes, found by comparing two segment
    lengths in mid-sequence. Under a power cap, interleaved passes share their clocks, and the pass that needs more
    power seems faster than it is. The passes over each length therefore run alone until the clocks have settled."""
    lengths = (longer, shorter)
    passes = [_build_passes(state, size, size, (sequence_length - size) // 2 or None)[0][:2] for size in lengths]
    readings: list[list[list[float]]] = [[], []]
    for _ in range(SPLIT_READINGS):
        for steps, times_s in zip(passes, readings, strict=True):
            run_for(SHORT_SETTLING_S[state.device.type], steps, state.device)
            times_s.append(_measure_medians_s(steps, state.device))
    longer_s, shorter_s = (
        [statistics.median(step_times_s) / length for step_times_s in zip(*times_s, strict=True)]
        for length, times_s in zip(lengths, readings, strict=True)
    )
    further = sequence_length / shorter - sequence_length / longer
    forward_s, backward_s = (max(0.0, s - other_s) / further for s, other_s in zip(shorter_s, longer_s, strict=True))
    return forward_s, backward_s


def _measure_weight_passes(block_math: BlockMath, device: torch.device, precision: Precision) -> tuple[float, float]:
    # GEMMs read the weights without a cast and add to the gradients themselves, except in fp8 and in experts.
    if not precision.recipe and not block_math.shape.experts:
        return 0.0, 0.0
    weights, gradients = (_draw_weights(block_math.shape, device, precision.dtype) for _ in range(2))

    def add_gradients() -> None:
        for name, gradient in gradients.items():
            gradient += weights[name]

    steps: list[Callable[[], object]] = [lambda: block_math.cast_weights(weights, backward=False), add_gradients]
    cast_s, sum_s = _measure_medians_s(steps, device)
    return cast_s, sum_s


def _draw_weights(shape: Model, device: torch.device, dtype: torch.dtype) -> NamedTensors:
    with torch.device("meta"):
        sizes = {name: parameter.shape for name, parameter in Block(shape).named_parameters()}
    return {name: torch.randn(*size, dtype=dtype, device=device) * 0.02 for name, size in sizes.items()}


class _BlockState(NamedTuple):
    math: BlockMath
    operands: NamedTensors  # the weights of a block as its passes read them
    gradients: NamedTensors

    @staticmethod
    def draw(block_math: BlockMath, device: torch.device, dtype: torch.dtype) -> _BlockState:
        weights = _draw_weights(block_math.shape, device, dtype)
        gradients = {name: torch.zeros_like(weight) for name, weight in weights.items()}
        return _BlockState(block_math, block_math.cast_weights(weights), gradients)

    @property
    def device(self) -> torch.device:
        return self.gradients["output.weight"].device


def _build_passes(
    state: _BlockState, tokens: int, length: int, tokens_before: int | None
) -> tuple[list[Callable[[], object]], int]:
    """Return a block's forward pass, then a backward pass for each of SAVED_ACTIVATIONS, and the activations' bytes.
    The passes run over `tokens` tokens: whole sequences of `length`, or segments of `length`, each preceded by
    `tokens_before` tokens of its sequence."""
    block_math, operands, gradients = state
    shape, device, dtype = block_math.shape, state.device, gradients["output.weight"].dtype

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, dtype=dtype, device=device) * 0.02

    x, d_out = draw(tokens, shape.hidden_size), draw(tokens, shape.hidden_size)
    rope, sequences = rope_table(shape, length, device), tokens // length
    of_each = (2 * shape.kv_heads, shape.head_size)
    earlier = draw(sequences, tokens_before, *of_each) if tokens_before else None
    d_keys_values = None
    if tokens_before is not None:
        own, before = (torch.zeros(sequences, n, *of_each, device=device) for n in (length, tokens_before))
        d_keys_values = own, before

    def forward() -> Activations:
        return block_math.forward(operands, x, rope, earlier)[1]

    activations = forward()

    def build_backward(saved_activations: SavedActivations) -> Callable[[], object]:
        saved = {name: activations[name] for name in SAVED_TENSORS[saved_activations]}
        return lambda: block_math.backward(operands, gradients, dict(saved), rope, d_out, earlier, d_keys_values)

    passes: list[Callable[[], object]] = [forward, *(build_backward(choice) for choice in SAVED_ACTIVATIONS)]
    return passes, sum(tensor.nbytes for tensor in activations.values())


def _measure_peak_bytes(step: Callable[[], object], device: torch.device) -> int:
    """Return the most bytes that a step allocates at once; 0 on a CPU, which does not report them."""
    if device.type == "cpu":
        return 0
    step()  # compilation also allocates memory
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    step()
    return torch.cuda.max_memory_allocated(device) - before


def _measure_lm_head(shape: Model, device: torch.device, dtype: torch.dtype) -> float:
    tokens = LOGIT_TOKENS if device.type == "cuda" else TIMED_CHUNK_TOKENS["cpu"]
    weight = torch.randn(shape.vocabulary, shape.hidden_size, dtype=dtype, device=device)
    hidden = torch.randn(tokens, shape.hidden_size, dtype=dtype, device=device)
    targets = torch.zeros(tokens, dtype=torch.long, device=device)
    d_weight = torch.zeros_like(weight)
    steps: list[Callable[[], object]] = [lambda: loss_and_gradients(hidden, weight, targets, tokens, d_weight)]
    run_for(SHORT_SETTLING_S[device.type], steps, device)  # clocks rose during compilation
    return _measure_medians_s(steps, device)[0] / tokens


def _measure_optimizer(device: torch.device, precision: Precision) -> float:
    numel = 1 << 25 if device.type == "cuda" else 1 << 16  # larger than any cache, and within a budget of one GiB
    weights, gradients = (torch.zeros(numel, device=device, dtype=precision.dtype) for _ in range(2))
    states = [torch.zeros(size, device=device, dtype=dtype) for size, dtype in precision.list_state_vectors(numel)]
    times_s = _measure_medians_s([lambda: AdamW().apply(1, weights, gradients, *states)], device)
    return times_s[0] / (numel * precision.dtype.itemsize)


def _measure_copies(device: torch.device) -> float:
    if device.type == "cpu":
        size = 1 << 22
        source, target = torch.zeros(2, size, dtype=torch.uint8)
        return _measure_medians_s([lambda: target.copy_(source)], device)[0] / size
    size = 1 << 27
    with Arena(2 * size, device) as arena:
        on_host = [arena.allocate(size, torch.uint8) for _ in range(2)]
        on_device = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2)]
        h2d, d2h = torch.cuda.Stream(device), torch.cuda.Stream(device)
        times_s = []
        for _ in range(6):
            started = time.perf_counter()
            with torch.cuda.stream(h2d):
                on_device[0].copy_(on_host[0], non_blocking=True)
            with torch.cuda.stream(d2h):
                on_host[1].copy_(on_device[1], non_blocking=True)
            torch.cuda.synchronize(device)
            times_s.append(time.perf_counter() - started)
    return statistics.median(times_s) / size
