"""Tokens of a step: new in each step, of the whole vocabulary, and the same ones for every layout."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from workloads.models.flops import document_lengths
from workloads.parallel.train import TokenSource


@given(st.integers(2, 200_000), st.integers(1, 5), st.integers(0, 2**31))
def test_the_parts_of_all_ranks_are_the_whole_batch(vocabulary: int, ranks: int, seed: int) -> None:
    source = TokenSource(vocabulary, 8, seed)
    whole = source.draw(3, range(2 * ranks)).tokens
    parts = [source.draw(3, range(2 * rank, 2 * rank + 2)).tokens for rank in range(ranks)]
    assert torch.equal(whole, torch.cat(parts)) and whole.shape == (2 * ranks, 9) and whole.dtype == torch.int64
    assert int(whole.min()) >= 0 and int(whole.max()) < vocabulary
    assert vocabulary < 1000 or not torch.equal(whole, source.draw(4, range(2 * ranks)).tokens)


def test_tokens_are_of_the_whole_vocabulary_with_the_shares_of_zipfs_law() -> None:
    ids = TokenSource(128_256, 50_000, seed=0).draw(0, range(8)).tokens.flatten()
    assert int(ids.max()) > 128_000
    # The share of the ids below n is ln(n + 1) / ln(vocabulary + 1).
    for below, share in ((1, 0.0589), (1023, 0.5893), (32_000, 0.8820)):
        assert abs(float((ids < below).float().mean()) - share) < 0.003


def test_every_sequence_has_the_same_documents_in_an_order_of_its_own() -> None:
    whole = TokenSource(512, 64, seed=0).draw(0, range(4))
    packed = TokenSource(512, 64, seed=0, document_tokens=10).draw(0, range(4))
    assert torch.equal(packed.tokens, whole.tokens) and whole.document_lengths is None
    assert packed.document_lengths is not None
    rows = packed.document_lengths.tolist()
    assert all(sorted(row) == list(document_lengths(64, 10)) for row in rows)
    assert len({tuple(row) for row in rows}) == 4
