"""The plan of a training run: where every tensor is stored and how a step is divided. Does not import torch.

`workloads.offload.plan_search` chooses a plan, and `workloads.offload.engine` executes it.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from workloads.models.flops import RecomputedLayer
from workloads.models.model import Model
from workloads.tables import read_toml

Location = Literal["device", "host"]
# The division of a step among the GPUs of a host. replicas: each GPU trains the whole model on its own sequences.
# sharded: each GPU keeps a share of every layer and gathers the other shares for each use. ring: layers are assigned to
# the GPUs round-robin, and each GPU passes chunks to the next.
Distribution = Literal["replicas", "sharded", "ring"]
SavedActivations = Literal["full", "gate", "projections", "attention", "input"]

GIB = 2**30
WEIGHT_SLOTS = 2  # device buffers that streamed layers share: one for the computing layer, one for the next copy
GRADIENT_SLOTS = 3  # the same two, and one for the copy back to the host
GATHERED_SLOTS = 2  # whole layers of a sharded model: the one that computes, and one that is gathered or reduced
# The number of chunks whose activations are copied at the same time. It is two, because copying a chunk may take longer
# than computing it if neighboring chunks stay on the device. The backward pass fetches the same number ahead.
CHUNKS_IN_FLIGHT = 2
LOGIT_TOKENS = 2048  # tokens whose logits the loss computes at a time

_TABLE = read_toml(__file__, "saved_activations.toml")
SAVED_TENSORS: dict[SavedActivations, tuple[str, ...]] = {name: tuple(some) for name, some in _TABLE["tensors"].items()}
SAVED_ACTIVATIONS: tuple[SavedActivations, ...] = tuple(SAVED_TENSORS)
RECOMPUTED_UNDER: dict[RecomputedLayer, tuple[SavedActivations, ...]] = {
    operation: tuple(choices) for operation, choices in _TABLE["recomputed_under"].items()
}
SAVED_ACTIVATIONS_TEXT: dict[SavedActivations, str] = _TABLE["texts"]


def recomputed_under(shape: Model) -> dict[RecomputedLayer, tuple[SavedActivations, ...]]:
    """Return RECOMPUTED_UNDER for a model. With norms of queries and keys, the GEMM before them is also recomputed."""
    return {**RECOMPUTED_UNDER, "qkv": SAVED_ACTIVATIONS} if shape.qk_norm else RECOMPUTED_UNDER


class ActivationPlan(NamedTuple):
    """Which activations a block saves of one chunk for the backward pass, and where they are stored."""

    saved: SavedActivations = "full"
    location: Location = "device"


@dataclass(frozen=True)
class LayerPlan:
    """The locations of one block's tensors. Tensors on the host are copied to the device for each use.

    Chunk n of a round uses entry n of `activations`, modulo the number of entries; one entry applies to all chunks.
    """

    weights: Location = "device"
    gradients: Location = "device"
    optimizer_states: Location = "device"
    activations: tuple[ActivationPlan, ...] = (ActivationPlan(),)

    def activations_of(self, chunk: int) -> ActivationPlan:
        return self.activations[chunk % len(self.activations)]


@dataclass(frozen=True, kw_only=True)
class Division:
    """The division of a training step, and the locations of tensors that do not belong to a layer.

    A step accumulates gradients over `accumulation_rounds` rounds. A round runs forward and backward over all layers
    once, each layer on `chunks_per_round` chunks. A chunk is `sequences_per_chunk` whole sequences. If
    `segments_per_sequence` is more than one, a chunk is one segment of each of these sequences, and a sequence's
    segments follow one another as separate chunks.
    """

    sequence_length: int
    sequences_per_chunk: int
    chunks_per_round: int
    accumulation_rounds: int
    segments_per_sequence: int = 1
    # For the embedding, last norm and LM head. Their weights and gradients stay on the device.
    embedding_and_head_states: Location = "device"
    keys_values_on: Location = "device"  # of sequences in several segments

    @property
    def groups_per_round(self) -> int:  # of `sequences_per_chunk` sequences each
        return self.chunks_per_round // self.segments_per_sequence

    @property
    def chunk_length(self) -> int:  # tokens of one sequence
        return self.sequence_length // self.segments_per_sequence

    @property
    def chunk_tokens(self) -> int:
        return self.sequences_per_chunk * self.chunk_length

    @property
    def round_tokens(self) -> int:
        return self.chunk_tokens * self.chunks_per_round

    @property
    def tokens_per_step(self) -> int:
        return self.round_tokens * self.accumulation_rounds


@dataclass(frozen=True)
class Plan(Division):
    """A division of a training step, and the locations of each layer's tensors; `layers` are the blocks, in order."""

    layers: tuple[LayerPlan, ...]

    def list_activations(self) -> list[ActivationPlan]:
        """Return what is saved for each chunk at each layer in a round."""
        return [layer.activations_of(chunk) for layer in self.layers for chunk in range(self.chunks_per_round)]


def count_training_state_bytes(shape: Model, element_bytes: int, state_bytes_per_parameter: float) -> float:
    """Return the bytes of weights, gradients and optimizer states, the minimum for any training run."""
    return shape.parameters * (2 * element_bytes + state_bytes_per_parameter)


def list_saved_tensors(saved_activations: SavedActivations, segments_per_sequence: int) -> tuple[str, ...]:
    """Return the names of the tensors that each chunk saves at a layer.

    The keys and values of a sequence in several segments are not included: every choice saves them once for the whole
    sequence, because later segments attend to them.
    """
    return tuple(name for name in SAVED_TENSORS[saved_activations] if segments_per_sequence == 1 or name != "kv")


def count_saved_bytes_per_token(
    shape: Model, saved_activations: SavedActivations, element_bytes: int, segments_per_sequence: int
) -> int:
    """Return the bytes per token that a chunk saves at a layer. The log-sum-exp of attention (lse) is in fp32. Gate and
    up of experts are one GEMM (`workloads.llama.expert_block`), so they are always saved together."""
    gate, up = shape.intermediate_size, shape.intermediate_size
    if shape.experts:
        gate, up = 2 * shape.experts_per_token * shape.expert_intermediate_size, 0
    sizes = {
        **dict.fromkeys(("x", "residual"), shape.hidden_size * element_bytes),
        **dict.fromkeys(("q", "attn_out"), shape.heads * shape.head_size * element_bytes),
        "gate": gate * element_bytes,
        "up": up * element_bytes,
        "kv": count_kv_bytes_per_token(shape, element_bytes),
        "lse": shape.heads * 4,
    }
    return sum(sizes[name] for name in list_saved_tensors(saved_activations, segments_per_sequence))


def count_kv_bytes_per_token(shape: Model, element_bytes: int) -> int:
    """Return the bytes per token of a layer's keys and values."""
    return 2 * shape.kv_heads * shape.head_size * element_bytes
