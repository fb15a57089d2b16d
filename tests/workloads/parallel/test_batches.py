"""Tokens of a step: new in each step, of the whole vocabulary, and the same ones for every layout."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from workloads.parallel.batches import TokenSource


@given(st.integers(2, 200_000), st.integers(1, 5), st.integers(0, 2**31))
def test_the_parts_of_all_ranks_are_the_whole_batch(vocabulary: int, ranks: int, seed: int) -> None:
    source = TokenSource(vocabulary, 9, seed)
    whole = source.draw(3, range(2 * ranks))
    parts = [source.draw(3, range(2 * rank, 2 * rank + 2)) for rank in range(ranks)]
    assert torch.equal(whole, torch.cat(parts)) and whole.dtype == torch.int64
    assert int(whole.min()) >= 0 and int(whole.max()) < vocabulary
    assert vocabulary < 1000 or not torch.equal(whole, source.draw(4, range(2 * ranks)))


def test_tokens_are_of_the_whole_vocabulary_with_the_shares_of_zipfs_law() -> None:
    ids = TokenSource(128_256, 50_000, seed=0).draw(0, range(8)).flatten()
    assert int(ids.max()) > 128_000
    # The share of the ids below n is ln(n + 1) / ln(vocabulary + 1).
    for below, share in ((1, 0.0589), (1023, 0.5893), (32_000, 0.8820)):
        assert abs(float((ids < below).float().mean()) - share) < 0.003
