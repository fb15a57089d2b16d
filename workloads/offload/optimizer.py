"""AdamW on flat vectors, in place."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from workloads.offload.planner import UPDATE_PIECE


@dataclass(frozen=True)
class AdamW:
    """Loshchilov and Hutter 2019; with bias correction, as PyTorch has it."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.1

    def apply(self, step: int, w: Tensor, g: Tensor, m: Tensor, v: Tensor) -> None:
        """Update flat vectors in place, in pieces, so that the fp32 in between stays small. `step` counts from one."""
        correction1, correction2 = 1 - self.beta1**step, 1 - self.beta2**step
        with torch.no_grad():
            for w_, g_, m_, v_ in zip(*(t.split(UPDATE_PIECE) for t in (w, g, m, v)), strict=True):
                g32 = g_.float()
                m32 = torch.lerp(g32, m_.float(), self.beta1)
                v32 = torch.lerp(g32 * g32, v_.float(), self.beta2)
                w32 = w_.float() * (1 - self.learning_rate * self.weight_decay)
                w32 -= self.learning_rate / correction1 * m32 / (torch.sqrt(v32 / correction2) + self.epsilon)
                w_.copy_(w32)
                m_.copy_(m32)
                v_.copy_(v32)
