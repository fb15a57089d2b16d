"""Training data: tokens from a file, or synthetic ones."""

from pathlib import Path

import numpy as np
import torch

TOKEN_ID_TYPES = {".u16": np.uint16, ".bin": np.uint16, ".u32": np.uint32}


def load_sequences(
    data: str | None, tokenizer: str | None, *, count: int, length: int, vocabulary: int, seed: int
) -> torch.Tensor:
    """Return int64 tokens [count, length] from the start of the file `data`, or synthetic tokens if it is None.

    Files ending in .bin or .u16 hold two-byte little-endian token ids, and .u32 files hold four-byte ids. Any other
    file is read as text. `tokenizer`, a tokenizer.json, encodes the text; without a tokenizer, each byte is a token.

    Raises ValueError if the file does not exist, has too few tokens, or has ids outside the vocabulary, or if the
    tokenizer does not exist or the package tokenizers is not installed.
    """
    if data is None:
        return synthetic_tokens(vocabulary, count, length, seed)
    path = Path(data)
    if not path.is_file():
        raise ValueError(f"data={data}: there is no such file")
    needed = count * length
    if path.suffix in TOKEN_ID_TYPES:
        ids = np.memmap(path, TOKEN_ID_TYPES[path.suffix], "r")[:needed].astype(np.int64)
    elif tokenizer is not None:
        try:
            from tokenizers import Tokenizer
        except ModuleNotFoundError as error:
            raise ValueError(f"tokenizer={tokenizer} needs the package tokenizers: pip install tokenizers") from error
        if not Path(tokenizer).is_file():
            raise ValueError(f"tokenizer={tokenizer}: there is no such file; it must be the path of a tokenizer.json")
        ids = np.array(Tokenizer.from_file(tokenizer).encode(path.read_text()).ids, dtype=np.int64)[:needed]
    else:
        with path.open("rb") as file:
            ids = np.frombuffer(file.read(needed), dtype=np.uint8).astype(np.int64)
    if len(ids) < needed:
        raise ValueError(f"data={data} has {len(ids)} tokens, but {count} sequences of {length} need {needed}")
    if ids.max() >= vocabulary:
        raise ValueError(
            f"data={data} has token id {ids.max()} at position {int(ids.argmax())}, "
            f"but the model's vocabulary has {vocabulary} tokens"
        )
    return torch.from_numpy(ids.reshape(count, length))


def synthetic_tokens(vocabulary: int, count: int, length: int, seed: int) -> torch.Tensor:
    """Return int64 tokens [count, length] from a random Markov chain that a model can learn.

    Each token is one of four equally likely successors of the token before it. Only the first 1024 tokens of the
    vocabulary occur. A model that knows the chain has a loss of ln 4.
    """
    known = min(vocabulary, 1024)
    random = np.random.default_rng(seed)
    successors, choices = random.integers(0, known, (known, 4)), random.integers(0, 4, (length, count))
    tokens = np.empty((length, count), dtype=np.int64)
    tokens[0] = random.integers(0, known, count)
    for position in range(1, length):
        tokens[position] = successors[tokens[position - 1], choices[position]]
    return torch.from_numpy(tokens.T.copy())
