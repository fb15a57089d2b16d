"""Training batches: new synthetic tokens in each step, the same ones in every layout."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from workloads.parallel.apply import Groups
from workloads.parallel.layout import Layout


@dataclass(frozen=True)
class TokenSource:
    """Draws sequences of `length` tokens over the whole vocabulary.

    The probability of an id falls as 1 / (id + 1), as that of words does (Zipf's law) and roughly that of a tokenizer's
    ids. So a model learns within a few steps: its loss falls from ln(vocabulary), which uniform tokens would keep.
    """

    vocabulary: int
    length: int
    seed: int

    def draw(self, step: int, sequences: Iterable[int]) -> Tensor:
        """Return some sequences of a step's global batch, [sequences, length] int64.

        Each sequence has a generator of its own, so that a rank draws its own part alone.
        """
        return torch.from_numpy(np.stack([self._draw_sequence(step, sequence) for sequence in sequences]))

    def _draw_sequence(self, step: int, sequence: int) -> np.ndarray:
        random = np.random.default_rng([self.seed, step, sequence]).random(self.length)
        # The logarithm is uniform, so id n has the share ln((n + 2) / (n + 1)) / ln(vocabulary + 1).
        return np.exp(random * np.log(self.vocabulary + 1)).astype(np.int64) - 1


def local_sequences(layout: Layout, groups: Groups) -> range:
    """Return which sequences of the global batch this rank trains on."""
    dp_rank = groups.mesh["dp_shard_cp"].get_local_rank() // layout.cp
    dp_rank += groups.mesh["dp_replicate"].get_local_rank() * layout.dp_shard
    count = layout.global_batch // layout.dp
    return range(dp_rank * count, (dp_rank + 1) * count)
