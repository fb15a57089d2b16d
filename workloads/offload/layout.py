"""Where everything of a training run lives: what a planner decides and an engine carries out. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Place = Literal["device", "host"]
Activations = Literal["full", "input", "input_on_host"]


@dataclass(frozen=True)
class LayerPlan:
    """One block. Its weights, gradients and optimizer states lie on the device or stream from the host.

    activations: all that the backward pass needs is kept on the device (full), or the block's input alone, there or on
    the host, and the rest is computed again
    """

    weights: Place = "device"
    gradients: Place = "device"
    states: Place = "device"
    activations: Activations = "full"


@dataclass(frozen=True)
class Plan:
    """A step is `rounds` times forward and backward over `chunks` chunks of `sequences` sequences each.

    layers: the blocks, in order; ends: embedding, last norm and head, whose weights and gradients stay on the device
    """

    layers: tuple[LayerPlan, ...]
    ends_states: Place
    sequence_length: int
    sequences: int
    chunks: int
    rounds: int

    @property
    def tokens_per_step(self) -> int:
        return self.sequence_length * self.sequences * self.chunks * self.rounds
