"""The supported files and how each is read. A value that a file does not contain stays unknown."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sweeper.common.errors import UserInputError
from sweeper.ingest.imported import ImportedResult, as_positive_int
from sweeper.ingest.logs import is_log, read_log

MAX_JSON_BYTES = 64 * 2**20
MAX_LINE_LENGTH = 4096
MAX_TOKENS_PER_STEP = 1e15
HEAD_BYTES = 8192  # of a file, by which its format is recognised


@dataclass(frozen=True)
class Format:
    """A supported file format.

    Attributes:
        recognises: takes a path and the first `HEAD_BYTES` of its text; returns whether the file has this format.
        read: yields the results of a file.
    """

    name: str
    recognises: Callable[[Path, str], bool]
    read: Callable[[Path], Iterator[ImportedResult]]


def detect_format(path: Path) -> Format:
    """Return the format of a file.

    Raises:
        UserInputError: the file cannot be opened, is empty, is not text or has no supported format.
    """
    try:
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
    except OSError as error:
        raise UserInputError(f"{path}: {error.strerror}") from error
    if not head.strip():
        raise UserInputError(f"{path}: is empty")
    try:
        text = head.decode(errors="strict" if len(head) < HEAD_BYTES else "ignore")
    except UnicodeDecodeError as error:
        raise UserInputError(f"{path}: is not text (byte {error.start})") from error
    if "\0" in text:
        raise UserInputError(f"{path}: is not text (a zero byte)")
    for file_format in FORMATS:
        if file_format.recognises(path, text):
            return file_format
    supported = "; ".join(file_format.name for file_format in FORMATS)
    raise UserInputError(f"{path}: unknown format. Supported: {supported}")


# ── tprimat ──


def _is_tprimat(_: Path, head: str) -> bool:
    return (
        head.lstrip().startswith("{") and '"platform"' in head and ('"gpu_info"' in head or '"training_config"' in head)
    )


def _read_tprimat(path: Path) -> Iterator[ImportedResult]:
    """Yield the one result of a tprimat benchmark. The older schema has `raw_step_times` for `step_times`."""
    if path.stat().st_size > MAX_JSON_BYTES:
        size_mib = path.stat().st_size / 2**20
        raise UserInputError(f"{path}: has {size_mib:.0f} MiB; a tprimat benchmark has at most 64 MiB")
    try:
        content = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise UserInputError(f"{path}: is truncated or not JSON ({error})") from error
    gpu = _get_mapping(content, "gpu_info")
    training = _get_mapping(content, "training_config")
    performance = _get_mapping(content, "performance_metrics")
    layout = _get_mapping(content, "parallelism_config")
    step_times_s = content.get("step_times", content.get("raw_step_times"))
    if not isinstance(step_times_s, list) or not step_times_s or not all(map(_as_positive_float, step_times_s)):
        raise UserInputError(f"{path}: has no list of positive step times (step_times or raw_step_times)")
    batch = _get_positive_int(training, "global_batch_size")
    length = _get_positive_int(training, "sequence_length")
    params = {
        "sequence_length": length,
        "global_batch": batch,
        "micro_batch": _get_positive_int(training, "micro_batch_size"),
        "tp": _get_positive_int(layout, "tensor_model_parallel_size"),
        "pp": _get_positive_int(layout, "pipeline_model_parallel_size"),
        "dp": _get_positive_int(layout, "data_parallel_size"),
    }
    claims = {
        "tokens_per_s": _as_positive_float(performance.get("tokens_per_second")),
        "tokens_per_s_per_gpu": _as_positive_float(performance.get("tokens_per_second_per_gpu")),
        "step_time_ms": 1e3 * (_as_positive_float(performance.get("avg_step_time_seconds")) or 0.0),
    }
    yield ImportedResult(
        name=path.stem,
        params={name: value for name, value in params.items() if value is not None},
        step_times_s=tuple(map(float, step_times_s)),
        tokens_per_step=(batch or 0) * (length or 0),
        devices=_get_positive_int(training, "num_gpus"),
        device=str(gpu.get("device_name", "")),
        claims={name: value for name, value in claims.items() if value},
        machine_info={
            "torch": gpu.get("pytorch_version", ""),
            "software": gpu.get("software_stack", ""),
            "timestamp": content.get("timestamp", ""),
        },
        contradictions=tuple(_find_tprimat_contradictions(training, layout, performance, len(step_times_s))),
    )


def _find_tprimat_contradictions(
    training: dict[str, Any], layout: dict[str, Any], performance: dict[str, Any], steps: int
) -> Iterator[str]:
    names = {training.get("parallel_strategy"), layout.get("strategy_name")} - {None}
    if len(names) > 1:
        yield f"the strategy has two names: {' and '.join(sorted(map(str, names)))}"
    if (claimed := _get_positive_int(performance, "total_steps")) is not None and claimed != steps:
        yield f"total_steps is {claimed}, but there are {steps} step times"
    degrees = [
        _get_positive_int(layout, f"{name}_parallel_size") for name in ("tensor_model", "pipeline_model", "data")
    ]
    if (
        (gpus := _get_positive_int(training, "num_gpus"))
        and all(degrees)
        and math.prod(d or 1 for d in degrees) != gpus
    ):
        yield f"the parallel degrees {' x '.join(map(str, degrees))} do not give {gpus} GPUs"


# ── ml_dataflow ──

# ml_dataflow's own order of columns, without a heading. Older files lack the two columns `used_…`.
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


def _is_ml_dataflow(path: Path, head: str) -> bool:
    cells = head.splitlines()[0].split(",")
    return (
        path.suffix == ".csv"
        and len(cells) in COLUMNS_BY_COUNT
        and all(_parse_number(cell) is not None for cell in cells)
    )


def _read_ml_dataflow(path: Path) -> Iterator[ImportedResult]:
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
            yield _convert_ml_dataflow_row(path, line_number, row)


def _convert_ml_dataflow_row(path: Path, line_number: int, row: dict[str, float]) -> ImportedResult:
    tokens = row["sequences_per_step"] * row["sequence_length"]
    if not 0 <= tokens < MAX_TOKENS_PER_STEP:
        raise UserInputError(
            f"{path}:{line_number}: {tokens:g} tokens per step; allowed are 0 to {MAX_TOKENS_PER_STEP:g}"
        )
    feasible = row["step_s"] > 0
    return ImportedResult(
        name=f"{path.stem} line {line_number}",
        params={"model_b": row["model_b"], **{name: row[name] for name in CONFIG_COLUMNS}},
        step_times_s=(row["step_s"],) if feasible else (),
        tokens_per_step=round(tokens),
        devices=1,
        feasible=feasible,
        claims={name: row[name] for name in CLAIM_COLUMNS} if feasible else {},
    )


FORMATS = (
    Format("tprimat benchmark (JSON)", _is_tprimat, _read_tprimat),
    Format("ml_dataflow results (CSV of 19 or 21 numbers a line)", _is_ml_dataflow, _read_ml_dataflow),
    Format(
        "log of Megatron-LM, Primus, Megatron-Bridge, NeMo or torchtitan",
        lambda path, _: is_log(path),
        read_log,
    ),
)


# ── plain values ──


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


def _get_mapping(content: dict[str, Any], key: str) -> dict[str, Any]:
    value = content.get(key)
    return value if isinstance(value, dict) else {}


def _get_positive_int(content: dict[str, Any], key: str) -> int | None:
    return as_positive_int(content.get(key))


def _as_positive_float(value: object) -> float | None:
    """Return a finite number above zero as a float, else None."""
    valid = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value > 0
    return float(value) if valid else None  # type: ignore[arg-type]


def _parse_number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
