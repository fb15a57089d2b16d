"""Tokens to train on."""

from __future__ import annotations

import numpy as np
import torch


def walk(vocabulary: int, sequences: int, length: int, seed: int) -> torch.Tensor:
    """Tokens [sequences, length] with something to learn, and no file needed: each is one of four successors of the
    one before, among the first thousand. A model that knew them would have a loss of ln 4."""
    known = min(vocabulary, 1024)
    random = np.random.default_rng(seed)
    successors, choices = random.integers(0, known, (known, 4)), random.integers(0, 4, (length, sequences))
    tokens = np.empty((length, sequences), dtype=np.int64)
    tokens[0] = random.integers(0, known, sequences)
    for place in range(1, length):
        tokens[place] = successors[tokens[place - 1], choices[place]]
    return torch.from_numpy(tokens.T.copy())
