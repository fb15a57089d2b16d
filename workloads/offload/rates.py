"""What this machine does for a model, measured in a few seconds before a plan is made."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from workloads.llama.model import Block, next_token_loss, rope_table
from workloads.llama.shapes import MODELS, LlamaShape
from workloads.offload.memory import Arena
from workloads.offload.optimizer import AdamW
from workloads.offload.planner import LOGIT_TOKENS, UPDATE_PIECE, Rates
from workloads.timing import time_in_turns

TOKENS = {"cuda": 8192, "cpu": 64}  # at least so many in a block that is timed


@cache
def machine_rates(model: str, sequence_length: int, device: torch.device, dtype: torch.dtype) -> Rates:
    """Once in a process for each model and sequence length."""
    shape = MODELS[model]
    forward_s, backward_s, full_bytes = _block(shape, sequence_length, device, dtype)
    up_s, down_s = _copies(device)
    return Rates(
        forward_s=forward_s,
        backward_s=backward_s,
        head_s=_head(shape, device, dtype),
        up_s_per_byte=up_s,
        down_s_per_byte=down_s,
        update_s_per_byte=_update(device, dtype),
        full_bytes=full_bytes,
    )


def _median_s(step: Callable[[], object], device: torch.device) -> float:
    return statistics.median(time_in_turns([step], device, warmup=2, repeats=5, cold_cache=False)[0])


def _block(
    shape: LlamaShape, sequence_length: int, device: torch.device, dtype: torch.dtype
) -> tuple[float, float, float]:
    """Seconds a token forward and backward, and the bytes that a token keeps in between."""
    sequences = max(1, TOKENS[device.type] // sequence_length)
    with device:
        block = Block(shape).to(dtype)
        x = torch.randn(sequences, sequence_length, shape.width, dtype=dtype)
    rope, tokens = rope_table(shape, sequence_length, device), sequences * sequence_length
    run = torch.compile(block, dynamic=False) if device.type == "cuda" else block

    def forward() -> None:
        with torch.no_grad():
            run(x, rope)

    def both() -> None:
        run(x.detach().requires_grad_(), rope).backward(x)

    forward_s, both_s = _median_s(forward, device), _median_s(both, device)
    own = {p.untyped_storage().data_ptr() for p in block.parameters()}
    kept: dict[int, int] = {}

    def count(t: Tensor) -> Tensor:
        if t.untyped_storage().data_ptr() not in own:
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with saved_tensors_hooks(count, lambda t: t):
        out = run(x.detach().requires_grad_(), rope)
    del out
    return forward_s / tokens, max(both_s - forward_s, forward_s) / tokens, sum(kept.values()) / tokens


def _head(shape: LlamaShape, device: torch.device, dtype: torch.dtype) -> float:
    """Seconds a token of the head and the loss, forward and backward."""
    tokens = LOGIT_TOKENS if device.type == "cuda" else TOKENS["cpu"]
    weight = torch.randn(shape.vocabulary, shape.width, dtype=dtype, device=device).requires_grad_()
    hidden = torch.randn(tokens, shape.width, dtype=dtype, device=device).requires_grad_()
    targets = torch.zeros(tokens, dtype=torch.long, device=device)

    def head() -> None:
        weight.grad = hidden.grad = None
        next_token_loss(hidden, weight, targets, tokens).backward()

    return _median_s(head, device) / tokens


def _update(device: torch.device, dtype: torch.dtype) -> float:
    """Seconds of AdamW for a byte of parameters."""
    numbers = UPDATE_PIECE if device.type == "cuda" else 1 << 16
    flats = [torch.zeros(numbers, device=device, dtype=dtype) for _ in "wgmv"]
    return _median_s(lambda: AdamW().apply(1, *flats), device) / (numbers * dtype.itemsize)


def _copies(device: torch.device) -> tuple[float, float]:
    """Seconds a byte up and down, pinned, while both run at once."""
    if device.type == "cpu":
        size = 1 << 22
        here, there = torch.zeros(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
        each = _median_s(lambda: there.copy_(here), device) / size
        return each, each
    size = 1 << 28
    arena = Arena(2 * size, device)
    hosts = [arena.take(size, torch.uint8) for _ in range(2)]
    devices = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2)]
    up, down = torch.cuda.Stream(device), torch.cuda.Stream(device)
    torch.cuda.synchronize(device)
    started = time.perf_counter()
    for _ in range(4):
        with torch.cuda.stream(up):
            devices[0].copy_(hosts[0], non_blocking=True)
        with torch.cuda.stream(down):
            hosts[1].copy_(devices[1], non_blocking=True)
    torch.cuda.synchronize(device)
    each = (time.perf_counter() - started) / 4 / size
    arena.close()
    return each, each
