"""What this machine does for a model, measured in a few seconds before a plan is made."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from workloads.llama.attention import Kernel, fastest_kernel
from workloads.llama.block import BlockMath
from workloads.llama.model import Block, loss_and_gradients, rope_table
from workloads.llama.shapes import MODELS, LlamaShape
from workloads.offload.cost_model import Rates
from workloads.offload.memory import Arena
from workloads.offload.optimizer import AdamW
from workloads.offload.plan import KEPT, KINDS, LOGIT_TOKENS, Keeps
from workloads.timing import time_in_turns

TOKENS = {"cuda": 8192, "cpu": 64}  # at least so many in a chunk that is timed
SETTLE_S = {"cuda": 6.0, "cpu": 0.0}  # clocks fall within seconds of load, and it is load that is to be predicted


def kernel_of(shape: LlamaShape, sequence_length: int, device: torch.device, dtype: torch.dtype) -> Kernel:
    return fastest_kernel(shape.heads, shape.kv_heads, shape.head_size, sequence_length, device, dtype)


@cache
def machine_rates(
    model: str, sequence_length: int, device: torch.device, dtype: torch.dtype, master_weights: bool
) -> Rates:
    """Once in a process for each model and sequence length."""
    shape = MODELS[model]
    forward_s, backward_s, workspace_bytes = _block(shape, sequence_length, device, dtype)
    up_s, down_s = _copies(device)
    return Rates(
        forward_s=forward_s,
        backward_s=backward_s["full"],
        again_s={keeps: max(0.0, seconds - backward_s["full"]) for keeps, seconds in backward_s.items()},
        head_s=_head(shape, device, dtype),
        up_s_per_byte=up_s,
        down_s_per_byte=down_s,
        update_s_per_byte=_update(device, dtype, master_weights),
        workspace_bytes=workspace_bytes,
        chunk_tokens=TOKENS[device.type],
    )


def _medians_s(steps: list[Callable[[], object]], device: torch.device) -> list[float]:
    times = time_in_turns(steps, device, warmup=2, repeats=5, cold_cache=False)
    return [statistics.median(each) for each in times]


def _block(
    shape: LlamaShape, sequence_length: int, device: torch.device, dtype: torch.dtype
) -> tuple[float, dict[Keeps, float], float]:
    """Seconds a token forward, and backward by what was kept, and bytes a token that backward works in.

    Of a long sequence the seconds are those of a piece in its middle, that has as much before it as a piece has on
    average, and the bytes those of its last, that needs the most.
    """
    length = min(sequence_length, TOKENS[device.type])
    tokens, last = max(1, TOKENS[device.type] // sequence_length) * length, sequence_length - length
    math = BlockMath(shape, kernel_of(shape, sequence_length, device, dtype), compiled=device.type != "cpu")
    with torch.no_grad():
        steps, kept_bytes = _passes(math, shape, tokens, length, last, device, dtype)
        # Of a CPU, which does not say, a guess on the safe side.
        workspace_bytes = (_peak_bytes(steps[-1], device) or 3.0 * kept_bytes) / tokens
        if last:
            del steps
            steps, _ = _passes(math, shape, tokens, length, last // 2, device, dtype)
        _settle(steps, device)
        forward_s, *backward_s = (seconds / tokens for seconds in _medians_s(steps, device))
    return forward_s, dict(zip(KINDS, backward_s, strict=True)), workspace_bytes


def _passes(
    math: BlockMath, shape: LlamaShape, tokens: int, length: int, before: int, device: torch.device, dtype: torch.dtype
) -> tuple[list[Callable[[], object]], int]:
    """A block forward, and backward for each of KINDS, over `tokens` tokens in sequences or pieces of `length` with
    `before` tokens before each; and how many bytes the activations have that forward makes."""

    def random(*size: int) -> Tensor:
        return torch.randn(*size, dtype=dtype, device=device) * 0.02

    with torch.device("meta"):
        sizes = {name: p.shape for name, p in Block(shape).named_parameters()}
    weights = {name: random(*size) for name, size in sizes.items()}
    gradients = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    x, d_out, rope = (
        random(tokens, shape.hidden_size),
        random(tokens, shape.hidden_size),
        rope_table(shape, length, device),
    )
    sequences = tokens // length
    earlier = random(sequences, before, 2 * shape.kv_heads, shape.head_size) if before else None
    own = torch.zeros(sequences, length, 2 * shape.kv_heads, shape.head_size, device=device)
    d_keys_values = (own, torch.zeros_like(earlier, dtype=torch.float32)) if earlier is not None else None
    made = math.forward(weights, x, rope, earlier)[1]

    def forward() -> None:
        math.forward(weights, x, rope, earlier)

    def backward(keeps: Keeps) -> Callable[[], object]:
        kept = {name: made[name] for name in KEPT[keeps]}
        return lambda: math.backward(weights, gradients, dict(kept), rope, d_out, earlier, d_keys_values)

    return [forward, *(backward(keeps) for keeps in KINDS)], sum(t.nbytes for t in made.values())


def _settle(steps: list[Callable[[], object]], device: torch.device) -> None:
    started = time.perf_counter()
    while time.perf_counter() - started < SETTLE_S[device.type]:
        for step in steps:
            step()
        torch.cuda.synchronize(device)


def _peak_bytes(step: Callable[[], object], device: torch.device) -> int:
    """What it allocates at most beside what is there; 0 on a CPU, which does not say."""
    if device.type == "cpu":
        return 0
    step()  # to compile takes memory too
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    step()
    return torch.cuda.max_memory_allocated(device) - before


def _head(shape: LlamaShape, device: torch.device, dtype: torch.dtype) -> float:
    """Seconds a token of the head and the loss, forward and backward."""
    tokens = LOGIT_TOKENS if device.type == "cuda" else TOKENS["cpu"]
    weight = torch.randn(shape.vocabulary, shape.hidden_size, dtype=dtype, device=device)
    hidden = torch.randn(tokens, shape.hidden_size, dtype=dtype, device=device)
    targets, d_weight = torch.zeros(tokens, dtype=torch.long, device=device), torch.zeros_like(weight)
    return _medians_s([lambda: loss_and_gradients(hidden, weight, targets, tokens, d_weight)], device)[0] / tokens


def _update(device: torch.device, dtype: torch.dtype, master_weights: bool) -> float:
    """Seconds of AdamW for a byte of weights."""
    # More than any cache holds, and little enough for a budget of one GiB.
    numbers = 1 << 25 if device.type == "cuda" else 1 << 16
    states = torch.float32 if master_weights else dtype
    flats = [torch.zeros(numbers, device=device, dtype=dtype) for _ in "wg"]
    flats += [torch.zeros(numbers, device=device, dtype=states) for _ in ("mvw" if master_weights else "mv")]
    return _medians_s([lambda: AdamW().apply(1, *flats)], device)[0] / (numbers * dtype.itemsize)


def _copies(device: torch.device) -> tuple[float, float]:
    """Seconds a byte up and down, pinned, while both run at once."""
    if device.type == "cpu":
        size = 1 << 22
        here, there = torch.zeros(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
        each = _medians_s([lambda: there.copy_(here)], device)[0] / size
        return each, each
    size = 1 << 27
    with Arena(2 * size, device) as arena:
        hosts = [arena.take(size, torch.uint8) for _ in range(2)]
        devices = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2)]
        up, down = torch.cuda.Stream(device), torch.cuda.Stream(device)

        def both_ways() -> None:
            with torch.cuda.stream(up):
                devices[0].copy_(hosts[0], non_blocking=True)
            with torch.cuda.stream(down):
                hosts[1].copy_(devices[1], non_blocking=True)
            torch.cuda.synchronize(device)

        times_s = []
        for _ in range(6):
            started = time.perf_counter()
            both_ways()
            times_s.append(time.perf_counter() - started)
    return statistics.median(times_s) / size, statistics.median(times_s) / size
