"""Tokens to train on: from a file, or made up."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

BINARY = {".u16": np.uint16, ".bin": np.uint16, ".u32": np.uint32}


def sequences(
    data: str | None, tokenizer: str | None, *, count: int, length: int, vocabulary: int, seed: int
) -> torch.Tensor:
    """Tokens [count, length], int64.

    data: a file of raw little-endian ids (.bin and .u16 two bytes each, .u32 four), read from its beginning; a text,
    encoded by the tokenizer (a tokenizer.json), without one byte by byte; null: made-up tokens from the seed.
    Raises ValueError where the file is not there, has too few tokens, or has ids past the vocabulary.
    """
    if data is None:
        return synthetic_tokens(vocabulary, count, length, seed)
    path = Path(data)
    if not path.is_file():
        raise ValueError(f"data={data}: there is no such file")
    wanted = count * length
    if path.suffix in BINARY:
        ids = np.memmap(path, BINARY[path.suffix], "r")[:wanted].astype(np.int64)
    elif tokenizer is not None:
        ids = _encoded(path, tokenizer)[:wanted]
    else:
        with path.open("rb") as file:
            ids = np.frombuffer(file.read(wanted), dtype=np.uint8).astype(np.int64)
    if len(ids) < wanted:
        raise ValueError(f"data={data}: has {len(ids)} tokens, {wanted} are needed ({count} sequences of {length})")
    if ids.max() >= vocabulary:
        raise ValueError(f"data={data}: token id {ids.max()} at {int(ids.argmax())}; the vocabulary has {vocabulary}")
    return torch.from_numpy(ids.reshape(count, length))


def _encoded(path: Path, tokenizer: str) -> np.ndarray:
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError as error:
        raise ValueError(f"tokenizer={tokenizer}: needs `pip install tokenizers`") from error
    if not Path(tokenizer).is_file():
        raise ValueError(f"tokenizer={tokenizer}: there is no such file; a tokenizer.json is wanted")
    return np.array(Tokenizer.from_file(tokenizer).encode(path.read_text()).ids, dtype=np.int64)


def synthetic_tokens(vocabulary: int, sequences: int, length: int, seed: int) -> torch.Tensor:
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
