"""Read ml_dataflow's results: a CSV without a heading, a result for each line."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sweeper.commands.ingest.imported import MAX_COUNT, Claims, ImportedResult
from workloads.api.errors import UserInputError

MAX_LINE_LENGTH = 4096
# ml_dataflow's own order of columns. Older files lack the two columns `used_…`.
COLUMNS = [
    "host_gib",
    "device_gib",
    "sequence_length",
    "model_b",
    "used_host_gib",
    "used_device_gib",
    "chunk_tokens",
    "host_activation_chunks",
    "saved_input_only",
    "saved_input_attn",
    "saved_full",
    "device_activation_chunks",
    "rounds",
    "sequences_per_step",
    "recompute_fraction",
    "attn_flop_fraction",
    "step_s",
    "tokens_per_s",
    "tflops",
    "mfu",
    "hfu",
]
OLDER_COLUMNS = [name for name in COLUMNS if not name.startswith("used_")]
COLUMNS_BY_COUNT = {len(columns): columns for columns in (COLUMNS, OLDER_COLUMNS)}
CONFIG_COLUMNS = ("host_gib", "device_gib", "sequence_length", "chunk_tokens", "rounds", "sequences_per_step")
CLAIM_COLUMNS = ("tokens_per_s", "tflops", "mfu", "hfu")
MEMORY_COLUMNS = {"used_host_gib": "peak_host_gib", "used_device_gib": "peak_device_gib"}
# Its models of 1 and 8 * 10^9 parameters are Llama 3: their FLOPs per token are ours. It has no catalogue's 15 and 32.
MODELS = {1.0: "llama3_1b", 8.0: "llama3_8b"}


def is_ml_dataflow(path: Path, head: str) -> bool:
    """Return whether a file with this beginning is one of ml_dataflow's results."""
    cells = head.splitlines()[0].split(",")
    return (
        path.suffix == ".csv"
        and len(cells) in COLUMNS_BY_COUNT
        and all(_parse_number(cell) is not None for cell in cells)
    )


def read_ml_dataflow(path: Path) -> Iterator[ImportedResult]:
    """Yield a result for each line: Llama training at one memory budget and sequence length.

    A line of zeros is an infeasible budget.
    """
    with path.open(newline="", errors="replace") as file:
        for line_number, cells in enumerate(csv.reader(_read_bounded_lines(file, path)), start=1):
            columns = COLUMNS_BY_COUNT.get(len(cells))
            values = [_parse_number(cell) for cell in cells]
            if columns is None or any(value is None for value in values):
                raise UserInputError(
                    f"{path}:{line_number}: has {len(cells)} cells; allowed are {len(COLUMNS)} or "
                    f"{len(OLDER_COLUMNS)} numbers"
                )
            row = dict(zip(columns, (value or 0.0 for value in values), strict=True))
            yield _convert_row(path, line_number, row)


def _convert_row(path: Path, line_number: int, row: dict[str, float]) -> ImportedResult:
    tokens = row["sequences_per_step"] * row["sequence_length"]
    if not 0 <= tokens <= MAX_COUNT:
        raise UserInputError(f"{path}:{line_number}: {tokens:g} tokens per step; allowed are 0 to {MAX_COUNT:g}")
    feasible = row["step_s"] > 0
    model = MODELS.get(row["model_b"])
    memory = {ours: row[name] for name, ours in MEMORY_COLUMNS.items() if row.get(name, 0.0) > 0}
    return ImportedResult(
        name=f"{path.stem} line {line_number}",
        params={
            **({"model": model} if model else {}),
            "model_b": row["model_b"],
            "dtype": "bf16",  # it trains in nothing else
            **{name: row[name] for name in CONFIG_COLUMNS},
        },
        step_times_s=(row["step_s"],) if feasible else (),
        tokens_per_step=round(tokens),
        devices=1,
        feasible=feasible,
        claims=Claims({name: row[name] for name in CLAIM_COLUMNS} if feasible else {}),
        metrics=memory if feasible else {},
    )


def _read_bounded_lines(file: Any, path: Path) -> Iterator[str]:
    """Yield the lines that are not empty. Raises UserInputError for one of more than `MAX_LINE_LENGTH` characters."""
    while line := file.readline(MAX_LINE_LENGTH):
        if len(line) == MAX_LINE_LENGTH:
            raise UserInputError(f"{path}: has a line of more than {MAX_LINE_LENGTH} characters")
        if not line.endswith(("\n", "\r")):  # the first digits of a truncated number are a valid number too
            raise UserInputError(
                f"{path}: its last line has no newline, so it may be truncated; add one if it is complete"
            )
        if line.strip():
            yield line


def _parse_number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
