"""Training data from files and synthetic tokens."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import examples
from workloads.api.contract import Rank
from workloads.api.trial import run_trial
from workloads.llama.data import load_sequences, synthetic_tokens


def read(data: object, tokenizer: object = None, *, count: int = 2, length: int = 3, vocabulary: int = 512):  # type: ignore[no-untyped-def]
    data_path = str(data) if data is not None else None
    tokenizer_path = str(tokenizer) if tokenizer is not None else None
    return load_sequences(data_path, tokenizer_path, count=count, length=length, vocabulary=vocabulary, seed=0)


@pytest.mark.parametrize(("suffix", "dtype"), [(".bin", np.uint16), (".u16", np.uint16), (".u32", np.uint32)])
def test_binary_files_are_read_as_token_ids(tmp_path: Path, suffix: str, dtype: type) -> None:
    path = tmp_path / f"tokens{suffix}"
    np.arange(10, dtype=dtype).tofile(path)
    assert read(path).tolist() == [[0, 1, 2], [3, 4, 5]]


def test_text_is_read_as_bytes_or_through_a_tokenizer(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    text = tmp_path / "a.txt"
    text.write_text("to be or not to be")
    assert bytes(read(text).flatten().tolist()) == b"to be "
    token_ids = {"to": 0, "be": 1, "or": 2, "not": 3}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(token_ids, unk_token="or"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert read(text, tmp_path / "tokenizer.json").tolist() == [[0, 1, 2], [3, 0, 1]]


def test_unusable_files_are_refused_with_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "tokens.u16"
    with pytest.raises(ValueError, match="no such file"):
        read(path)
    np.array([1, 2, 700, 4, 5, 6], dtype=np.uint16).tofile(path)
    with pytest.raises(ValueError, match="has 6 tokens, but 4 sequences of 3 need 12"):
        read(path, count=4)
    with pytest.raises(ValueError, match="has token id 700 at position 2, but the model's vocabulary has 512 tokens"):
        read(path)


@examples(20)
@given(st.integers(4, 3000), st.integers(1, 4), st.integers(2, 40), st.integers(0, 2**31))
def test_synthetic_tokens_are_within_the_vocabulary_and_reproducible(
    vocabulary: int, count: int, length: int, seed: int
) -> None:
    tokens = synthetic_tokens(vocabulary, count, length, seed)
    assert tokens.shape == (count, length) and int(tokens.min()) >= 0 and int(tokens.max()) < vocabulary
    assert torch.equal(tokens, synthetic_tokens(vocabulary, count, length, seed))


def test_training_on_a_text_lowers_the_loss(tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 200)
    parameters = {"model": "llama_tiny", "sequence_length": 32, "sequences_per_step": 4, "dtype": "fp32", "warmup": 0}
    budgets = {"device_gib": 1.0, "host_gib": 0.0, "learning_rate": 3e-3, "steps": 30, "data": str(text)}
    metrics = run_trial("offload", {**parameters, **budgets}, Rank()).metrics
    assert metrics["loss"] < 0.6 * metrics["first_loss"]
