"""AdamW on flat vectors, in place."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

UPDATE_PIECE = 1 << 24  # numbers at a time on a CPU, so that the fp32 in between stays small


@dataclass(frozen=True)
class AdamW:
    """Loshchilov and Hutter 2019; with bias correction, as PyTorch has it. The arithmetic is in fp32."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.1

    def apply(self, step: int, w: Tensor, g: Tensor, m: Tensor, v: Tensor, master: Tensor | None = None) -> None:
        """Update flat vectors in place; `step` counts from one.

        master: the weights in fp32, which are then updated, and `w` becomes what `w` can hold of them.
        """
        # Never one tensor twice: a compiled function that writes to it would copy it first.
        vectors = [w, g, m, v] if master is None else [w, g, m, v, master]
        piece = UPDATE_PIECE if w.device.type == "cpu" else w.numel()
        # Numbers that change from step to step are tensors, or a compiled function would be compiled again.
        scales = (
            torch.full((), self.learning_rate / (1 - self.beta1**step), device=w.device),
            torch.full((), 1 / (1 - self.beta2**step), device=w.device),
        )
        decay = 1 - self.learning_rate * self.weight_decay
        update = _update if w.device.type == "cpu" else _compiled_update
        with torch.no_grad():
            for parts in zip(*(t.split(piece) for t in vectors), strict=True):
                update(parts, *scales, decay, self.beta1, self.beta2, self.epsilon)


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
    for kept in (w, *masters):
        kept.copy_(w32)
    m.copy_(m32)
    v.copy_(v32)


_compiled_update = torch.compile(_update, dynamic=False)
