"""Documents that are packed into sequences: tokens attend to earlier tokens of their own document alone. No torch."""

from __future__ import annotations

import math
from itertools import accumulate, pairwise


def document_lengths(sequence_length: int, document_tokens: int) -> tuple[int, ...]:
    """Return the lengths of the documents of a sequence, in ascending order; 0 tokens stand for one document.

    They are quantiles of the exponential distribution with this mean: most documents are short, most tokens are in long
    ones. Every sequence has the same lengths in an order of its own, so that all ranks and steps do the same work.
    """
    count = max(1, round(sequence_length / document_tokens)) if document_tokens else 1
    quantiles = [-math.log(1 - (number + 0.5) / count) for number in range(count)]
    shared_tokens = sequence_length - count  # each document has one token at least
    ends = [0, *(round(shared_tokens * total / sum(quantiles)) for total in accumulate(quantiles))]
    return tuple(sorted(1 + stop - start for start, stop in pairwise(ends)))


def attended_length(sequence_length: int, document_tokens: int) -> float:
    """Return the length of a sequence without documents whose attention costs as much for each of its tokens."""
    return sum(length**2 for length in document_lengths(sequence_length, document_tokens)) / sequence_length
