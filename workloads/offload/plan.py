"""Where everything of a training run lives: what a planner decides and an engine carries out. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from workloads.llama.flops import RecomputedLayer
from workloads.llama.shapes import LlamaShape

Place = Literal["device", "host"]
Keeps = Literal["full", "gate", "projections", "attention", "input"]

GIB = 2**30
WEIGHT_SLOTS = 2  # for layers that stream: the one that computes, and the next on its way
GRADIENT_SLOTS = 3  # and one on its way home
AHEAD = 2  # so many chunks' activations are on their way back before they are needed
LOGIT_TOKENS = 2048  # what the loss takes at a time
KINDS: tuple[Keeps, ...] = ("full", "gate", "projections", "attention", "input")  # from the most that is kept

# What of `workloads.llama.block.Activations` each kind keeps; the rest is computed again.
KEPT: dict[Keeps, tuple[str, ...]] = {
    "full": ("x", "q", "kv", "attn_out", "lse", "residual", "gate", "up"),
    "gate": ("x", "q", "kv", "attn_out", "lse", "residual", "gate"),
    "projections": ("x", "q", "kv", "attn_out", "lse", "residual"),
    "attention": ("x", "attn_out", "lse"),
    "input": ("x",),
}


# What of a block is computed again, and by which kinds; its last product never is.
AGAIN: dict[RecomputedLayer, tuple[Keeps, ...]] = {
    "qkv": ("attention", "input"),
    "attention": ("input",),
    "output": ("attention", "input"),
    "gate": ("projections", "attention", "input"),
    "up": ("gate", "projections", "attention", "input"),
}


@dataclass(frozen=True)
class LayerPlan:
    """One block. Its weights, gradients and optimizer states lie on the device or stream from the host.

    keeps: which activations wait for the backward pass: all (full), all but one of the two wide ones inside the MLP
    (gate), or but both (projections), the block's input and what attention made of it, or the input alone; kept_on:
    where they wait
    """

    weights: Place = "device"
    gradients: Place = "device"
    states: Place = "device"
    keeps: Keeps = "full"
    kept_on: Place = "device"


@dataclass(frozen=True)
class Plan:
    """A step is `rounds` times forward and backward over `chunks` chunks. A chunk is `sequences` whole sequences, or,
    where `pieces` is more than one, one of so many pieces of them, one after the other.

    layers: the blocks, in order; ends_states: of embedding, last norm and head, whose weights and gradients stay on the
    device
    """

    layers: tuple[LayerPlan, ...]
    ends_states: Place
    sequence_length: int
    sequences: int
    chunks: int
    rounds: int
    pieces: int = 1

    @property
    def groups(self) -> int:
        """So many times `sequences` sequences are in a round."""
        return self.chunks // self.pieces

    @property
    def chunk_length(self) -> int:
        return self.sequence_length // self.pieces

    @property
    def chunk_tokens(self) -> int:
        return self.sequences * self.chunk_length

    @property
    def tokens_per_step(self) -> int:
        return self.chunk_tokens * self.chunks * self.rounds


def trained_bytes(shape: LlamaShape, element_bytes: int) -> int:
    """Weights, gradients and the optimizer's two states, in numbers of `width` bytes: the least that training takes."""
    return 4 * shape.parameters * element_bytes


def kept_names(keeps: Keeps, pieces: int) -> tuple[str, ...]:
    """What a chunk leaves at a layer. Of a sequence in pieces keys and values are kept in one: its later pieces need
    them, whatever is kept."""
    return tuple(name for name in KEPT[keeps] if pieces == 1 or name != "kv")


def kept_bytes(shape: LlamaShape, keeps: Keeps, element_bytes: int, pieces: int) -> int:
    """For a token, of a type of `width` bytes; the attention's log of sums is fp32."""
    heads = shape.heads * shape.head_size
    sizes = {
        "x": shape.hidden_size * element_bytes,
        "q": heads * element_bytes,
        "kv": keys_values_bytes(shape, element_bytes),
        "attn_out": heads * element_bytes,
        "lse": shape.heads * 4,
        "residual": shape.hidden_size * element_bytes,
        "gate": shape.intermediate_size * element_bytes,
        "up": shape.intermediate_size * element_bytes,
    }
    return sum(sizes[name] for name in kept_names(keeps, pieces))


def keys_values_bytes(shape: LlamaShape, element_bytes: int) -> int:
    """For a token of a sequence in pieces, whose later pieces need them."""
    return 2 * shape.kv_heads * shape.head_size * element_bytes
