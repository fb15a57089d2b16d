"""AdamW on flat vectors, in place."""

import math
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from workloads.instruments.device import compiled_on_gpu

CPU_UPDATE_NUMEL = 1 << 24  # elements that a CPU updates at a time, to keep the fp32 intermediates small
INT8_BLOCK = 256  # elements that share a scale, as in Dettmers et al. 2022 and torchao
StateFormat = Literal["fp32", "bf16", "int8"]
Rounding = Literal["nearest", "stochastic"]
STATE_DTYPES: dict[StateFormat, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.uint8}


@dataclass(frozen=True)
class Precision:
    """The data types of a training run."""

    dtype: torch.dtype = torch.bfloat16  # of weights, gradients and activations
    master_weights: bool = False  # the optimizer has a copy of the weights in fp32
    recipe: str = ""  # from `workloads.api.recipes`, for the blocks' GEMMs; empty: `dtype`
    # The format of momentum and variance. int8 stores codes of a table of 256 numbers, with an fp32 scale per block of
    # INT8_BLOCK numbers. None: the weights' type, but fp32 with master weights.
    optimizer_states: StateFormat | None = None

    def list_state_vectors(self, numel: int) -> list[tuple[int, torch.dtype]]:
        """Return the length and data type of each vector that the optimizer stores for `numel` parameters. The vectors
        are momentum, variance, with int8 the scales of both, and the master weights if there are any."""
        default: StateFormat = "bf16" if self.dtype == torch.bfloat16 and not self.master_weights else "fp32"
        state_format = self.optimizer_states or default
        vectors = 2 * [(numel, STATE_DTYPES[state_format])]
        if state_format == "int8":
            vectors += 2 * [(numel // math.gcd(numel, INT8_BLOCK), torch.float32)]
        return vectors + self.master_weights * [(numel, torch.float32)]


@dataclass(frozen=True)
class AdamW:
    """AdamW (Loshchilov and Hutter 2019) with bias correction as in PyTorch. The arithmetic is in fp32."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.1
    rounding: Rounding = "nearest"  # of bf16 weights that have no master weights

    def apply(self, step: int, w: Tensor, g: Tensor, *states: Tensor) -> None:
        """Update the flat vectors of weights `w` and states in place, using the gradients `g`. Steps count from one.

        The states are the vectors that `Precision.list_state_vectors` lists. If there are master weights, they are
        updated, and `w` is rounded from them.
        """
        # No tensor is passed twice, because a compiled function that writes to it would first copy it.
        vectors = [w, g, *states]
        pieces = -(-w.numel() // CPU_UPDATE_NUMEL) if w.device.type == "cpu" else 1
        # Numbers that differ between steps or trials are tensors; otherwise the function would be compiled again.
        rate = torch.full((), self.learning_rate / (1 - self.beta1**step), device=w.device)
        correction = torch.full((), 1 / (1 - self.beta2**step), device=w.device)
        decay = torch.full((), 1 - self.learning_rate * self.weight_decay, device=w.device)
        seed = None
        if self.rounding == "stochastic":
            seed = torch.full((), step * 0x9E3779B1 % 2**31, dtype=torch.int32, device=w.device)
        maps = _load_int8_maps(w.device) if states[0].dtype == torch.uint8 else ()
        sizes = [-(-CPU_UPDATE_NUMEL * len(vector) // len(w)) if pieces > 1 else len(vector) for vector in vectors]
        with torch.no_grad():
            for parts in zip(*(v.split(size) for v, size in zip(vectors, sizes, strict=True)), strict=True):
                _update(rate, correction, decay, parts, maps, self.beta1, self.beta2, self.epsilon, seed)


@compiled_on_gpu
def _update(
    rate: Tensor,
    correction: Tensor,
    decay: Tensor,
    vectors: tuple[Tensor, ...],
    int8_maps: tuple[Tensor, ...],
    beta1: float,
    beta2: float,
    epsilon: float,
    seed: Tensor | None,
) -> None:
    w, g, m, v, *others = vectors
    scales, masters = (others[:2], others[2:]) if int8_maps else ([], others)
    g32 = g.float()
    if int8_maps:
        from torchao.optim.quant_utils import dequant_with_qmap, quantize_8bit_with_qmap, scale_tensor

        states = zip((m, v), int8_maps, scales, strict=True)
        m32, v32 = [dequant_with_qmap(state, table, scale) for state, table, scale in states]
    else:
        m32, v32 = m.float(), v.float()
    m32 = torch.lerp(g32, m32, beta1)
    v32 = torch.lerp(g32 * g32, v32, beta2)
    w32 = (masters[0] if masters else w).float() * decay - rate * m32 / (torch.sqrt(v32 * correction) + epsilon)
    for target in (w, *masters):
        target.copy_(w32 if seed is None else _round_stochastically(w32, seed))
    if not int8_maps:
        m.copy_(m32)
        v.copy_(v32)
        return
    for state, scale, table, value in zip((m, v), scales, int8_maps, (m32, v32), strict=True):
        scaled, largest = scale_tensor(value, value.numel() // scale.numel())  # by the largest magnitude of each block
        state.copy_(quantize_8bit_with_qmap(scaled, table))
        scale.copy_(largest)


def _round_stochastically(values: Tensor, seed: Tensor) -> Tensor:
    """Round fp32 numbers to bf16 values, away from zero with a probability equal to the truncated fraction. The random
    bits are MurmurHash3's finalizer of index and seed, so all placements and replicas round identically."""
    bits = torch.arange(values.numel(), dtype=torch.int32, device=values.device) + seed
    bits = (bits ^ (bits >> 16 & 0xFFFF)) * (0x85EBCA6B - 2**32)
    bits = (bits ^ (bits >> 13 & 0x7FFFF)) * (0xC2B2AE35 - 2**32)
    bits = (bits ^ bits >> 16) & 0xFFFF
    return (values.view(torch.int32) + bits & -0x10000).view(torch.float32)


@cache
def _load_int8_maps(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the values that the int8 codes of momentum (signed) and variance (unsigned) stand for."""
    from torchao.optim.quant_utils import create_dynamic_map

    signed, unsigned = create_dynamic_map(signed=True), create_dynamic_map(signed=False)
    return torch.tensor(signed, device=device), torch.tensor(unsigned, device=device)
