"""Training batches: new synthetic tokens in each step, the same ones in every layout."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from workloads.layouts.layout import Layout
from workloads.models.flops import document_lengths
from workloads.parallel.apply import Groups


@dataclass(frozen=True)
class Batch:
    """Sequences of a step."""

    tokens: Tensor  # [sequences, length + 1] int64: inputs and, one token later, their targets
    # Of each sequence's documents in their order, [sequences, documents] int64; None where a sequence is one document.
    document_lengths: Tensor | None = None

    def select(self, sequences: range) -> Batch:
        return self._map(lambda tensor: tensor[sequences.start : sequences.stop])

    def pin_memory(self) -> Batch:
        return self._map(Tensor.pin_memory)

    def to(self, device: torch.device) -> Batch:
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def _map(self, function: Callable[[Tensor], Tensor]) -> Batch:
        lengths = self.document_lengths
        return Batch(function(self.tokens), None if lengths is None else function(lengths))


@dataclass(frozen=True)
class TokenSource:
    """Draws sequences of `length` inputs over the whole vocabulary, of documents with `document_tokens` on average.

    The probability of an id falls as 1 / (id + 1), as that of words does (Zipf's law) and roughly that of a tokenizer's
    ids. So a model learns within a few steps: its loss falls from ln(vocabulary), which uniform tokens would keep.
    """

    vocabulary: int
    length: int
    seed: int
    document_tokens: int = 0

    def draw(self, step: int, sequences: Iterable[int]) -> Batch:
        """Return some sequences of a step's global batch.

        Each sequence has a generator of its own, so that a rank draws its own part alone.
        """
        tokens, lengths = [], []
        for sequence in sequences:
            random = np.random.default_rng([self.seed, step, sequence])
            # The logarithm is uniform, so id n has the share ln((n + 2) / (n + 1)) / ln(vocabulary + 1).
            drawn = np.exp(random.random(self.length + 1) * np.log(self.vocabulary + 1)).astype(np.int64) - 1
            tokens.append(drawn)
            lengths.append(random.permutation(document_lengths(self.length, self.document_tokens)))
        packed = torch.from_numpy(np.stack(lengths)) if self.document_tokens else None
        return Batch(torch.from_numpy(np.stack(tokens)), packed)


def local_sequences(layout: Layout, groups: Groups) -> range:
    """Return which sequences of the global batch this rank trains on."""
    dp_rank = groups.mesh["dp_shard_cp"].get_local_rank() // layout.cp
    dp_rank += groups.mesh["dp_replicate"].get_local_rank() * layout.dp_shard
    count = layout.global_batch // layout.dp
    return range(dp_rank * count, (dp_rank + 1) * count)
