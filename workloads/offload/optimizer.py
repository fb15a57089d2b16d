"""AdamW on flat vectors, in place."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from workloads.api.recipes import MULTIPLES

CPU_UPDATE_NUMEL = 1 << 24  # numbers that a CPU updates at a time, so that the fp32 intermediates stay small


@dataclass(frozen=True)
class Precision:
    """The data types of a training run.

    Attributes:
        dtype: of weights, gradients and activations.
        master_weights: the optimizer's states are fp32, and one of them is a copy of the weights.
        recipe: of `workloads.api.recipes`, for the matrix products of blocks; empty: they are in `dtype`.
    """

    dtype: torch.dtype = torch.bfloat16
    master_weights: bool = False
    recipe: str = ""

    @property
    def state_dtype(self) -> torch.dtype:
        return torch.float32 if self.master_weights else self.dtype

    @property
    def state_count(self) -> int:
        """Number of states of a parameter: momentum, variance and possibly the master weight."""
        return 3 if self.master_weights else 2

    @property
    def state_bytes_per_parameter(self) -> int:
        return self.state_count * self.state_dtype.itemsize

    @property
    def cast_bytes_per_parameter(self) -> int:
        """Bytes of a weight that is cast for the products of a pass: by rows and by columns, one byte each."""
        return 2 if self.recipe else 0

    @property
    def token_multiple(self) -> int:
        """The number that the tokens of a chunk are a multiple of: products sum over them for weight gradients."""
        return MULTIPLES[self.recipe][2] if self.recipe else 1


@dataclass(frozen=True)
class AdamW:
    """AdamW (Loshchilov and Hutter 2019) with bias correction as in PyTorch. The arithmetic is in fp32."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.1

    def apply(self, step: int, w: Tensor, g: Tensor, m: Tensor, v: Tensor, master: Tensor | None = None) -> None:
        """Update the weights `w` and the states `m` and `v` in place.

        Args:
            step: the number of the step, from one.
            w, g, m, v: flat vectors: weights, gradients, momentum and variance.
            master: the weights in fp32. Where they are given, they are updated, and `w` is rounded from them.
        """
        # No tensor is passed twice: a compiled function that writes to it would copy it first.
        vectors = [w, g, m, v] if master is None else [w, g, m, v, master]
        numel = CPU_UPDATE_NUMEL if w.device.type == "cpu" else w.numel()
        # Numbers that change from step to step are tensors: a compiled function would be compiled again for others.
        rate = torch.full((), self.learning_rate / (1 - self.beta1**step), device=w.device)
        correction = torch.full((), 1 / (1 - self.beta2**step), device=w.device)
        decay = 1 - self.learning_rate * self.weight_decay
        update = _update if w.device.type == "cpu" else _compiled_update
        with torch.no_grad():
            for parts in zip(*(vector.split(numel) for vector in vectors), strict=True):
                update(parts, rate, correction, decay, self.beta1, self.beta2, self.epsilon)


def _update(
    vectors: tuple[Tensor, ...],
    rate: Tensor,
    correction: Tensor,
    decay: float,
    beta1: float,
    beta2: float,
    epsilon: float,
) -> None:
    w, g, m, v, *masters = vectors
    g32 = g.float()
    m32 = torch.lerp(g32, m.float(), beta1)
    v32 = torch.lerp(g32 * g32, v.float(), beta2)
    w32 = (masters[0] if masters else w).float() * decay - rate * m32 / (torch.sqrt(v32 * correction) + epsilon)
    for target in (w, *masters):
        target.copy_(w32)
    m.copy_(m32)
    v.copy_(v32)


_compiled_update = torch.compile(_update, dynamic=False)
