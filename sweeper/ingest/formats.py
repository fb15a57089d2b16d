"""The files that are understood, and what each one says. What a file does not say stays unknown."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sweeper.common.errors import UserInputError
from sweeper.ingest.imported import Imported, whole
from sweeper.ingest.logs import is_log, read_log

MOST_JSON_BYTES = 64 * 2**20
MOST_LINE = 4096
MOST_TOKENS = 1e15  # in a step


@dataclass(frozen=True)
class Format:
    """recognises: whether the first bytes of a file look like it; read: its results, one at a time."""

    name: str
    recognises: Callable[[Path, str], bool]
    read: Callable[[Path], Iterator[Imported]]


def recognise(path: Path) -> Format:
    """Raises UserInputError for a file that is none of these, is empty, or is no text."""
    try:
        with path.open("rb") as file:
            head = file.read(8192)
    except OSError as error:
        raise UserInputError(f"{path}: {error.strerror}") from error
    if not head.strip():
        raise UserInputError(f"{path}: is empty")
    try:
        text = head.decode(errors="strict" if len(head) < 8192 else "ignore")
    except UnicodeDecodeError as error:
        raise UserInputError(f"{path}: is no text (byte {error.start})") from error
    if "\0" in text:
        raise UserInputError(f"{path}: is no text (a zero byte)")
    for each in FORMATS:
        if each.recognises(path, text):
            return each
    known = "; ".join(each.name for each in FORMATS)
    raise UserInputError(f"{path}: is of no format that is understood ({known})")


# ── tprimat ──


def _is_tprimat(_: Path, head: str) -> bool:
    return (
        head.lstrip().startswith("{") and '"platform"' in head and ('"gpu_info"' in head or '"training_config"' in head)
    )


def _read_tprimat(path: Path) -> Iterator[Imported]:
    """A benchmark of tprimat, in either generation of its schema: the older has `raw_step_times`."""
    if path.stat().st_size > MOST_JSON_BYTES:
        raise UserInputError(f"{path}: {path.stat().st_size / 2**20:.0f} MiB, a benchmark of tprimat has less than 64")
    try:
        plain = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise UserInputError(f"{path}: is cut off, or no JSON ({error})") from error
    gpu, training, performance = (
        _mapping(plain, key) for key in ("gpu_info", "training_config", "performance_metrics")
    )
    layout = _mapping(plain, "parallelism_config")
    times = plain.get("step_times", plain.get("raw_step_times"))
    if not isinstance(times, list) or not times or not all(_time(each) for each in times):
        raise UserInputError(f"{path}: has no list of step times above zero")
    batch, length = _whole(training, "global_batch_size"), _whole(training, "sequence_length")
    params = {
        "sequence_length": length,
        "global_batch": batch,
        "micro_batch": _whole(training, "micro_batch_size"),
        "tp": _whole(layout, "tensor_model_parallel_size"),
        "pp": _whole(layout, "pipeline_model_parallel_size"),
        "dp": _whole(layout, "data_parallel_size"),
    }
    claims = {
        "tokens_per_s": _time(performance.get("tokens_per_second")),
        "tokens_per_s_per_gpu": _time(performance.get("tokens_per_second_per_gpu")),
        "step_time_ms": 1e3 * (_time(performance.get("avg_step_time_seconds")) or 0.0),
    }
    yield Imported(
        name=path.stem,
        params={name: value for name, value in params.items() if value is not None},
        step_times_s=tuple(map(float, times)),
        tokens_per_step=(batch or 0) * (length or 0),
        devices=_whole(training, "num_gpus"),
        device=str(gpu.get("device_name", "")),
        claims={name: value for name, value in claims.items() if value},
        machine_info={
            "torch": gpu.get("pytorch_version", ""),
            "software": gpu.get("software_stack", ""),
            "timestamp": plain.get("timestamp", ""),
        },
        contradictions=tuple(_tprimat_contradictions(training, layout, performance, len(times))),
    )


def _tprimat_contradictions(
    training: dict[str, Any], layout: dict[str, Any], performance: dict[str, Any], steps: int
) -> Iterator[str]:
    named = {training.get("parallel_strategy"), layout.get("strategy_name")} - {None}
    if len(named) > 1:
        yield f"the strategy is called {' and '.join(sorted(map(str, named)))}"
    if (claimed := _whole(performance, "total_steps")) is not None and claimed != steps:
        yield f"{claimed} steps are claimed, {steps} times are there"
    degrees = [_whole(layout, f"{name}_parallel_size") for name in ("tensor_model", "pipeline_model", "data")]
    if (gpus := _whole(training, "num_gpus")) and all(degrees) and math.prod(d or 1 for d in degrees) != gpus:
        yield f"degrees {' x '.join(map(str, degrees))} do not make {gpus} GPUs"


# ── ml_dataflow ──

# Its own order of columns, without a heading; the older files lack the two that say what was used.
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
OLDER = [name for name in COLUMNS if not name.startswith("used_")]


def _is_ml_dataflow(path: Path, head: str) -> bool:
    cells = head.splitlines()[0].split(",")
    return (
        path.suffix == ".csv"
        and len(cells) in (len(COLUMNS), len(OLDER))
        and all(_number(cell) is not None for cell in cells)
    )


def _read_ml_dataflow(path: Path) -> Iterator[Imported]:
    """Llama training within memory budgets, one line a budget and sequence length; a line of zeros did not work."""
    with path.open(newline="", errors="replace") as file:
        for number, cells in enumerate(csv.reader(_bounded(file, path)), start=1):
            names = {len(COLUMNS): COLUMNS, len(OLDER): OLDER}.get(len(cells))
            values = [_number(cell) for cell in cells]
            if names is None or any(value is None for value in values):
                raise UserInputError(
                    f"{path}:{number}: {len(COLUMNS)} or {len(OLDER)} numbers were expected, there are {len(cells)}"
                )
            yield _ml_dataflow_row(path, number, dict(zip(names, (v or 0.0 for v in values), strict=True)))


def _ml_dataflow_row(path: Path, number: int, row: dict[str, float]) -> Imported:
    product = row["sequences_per_step"] * row["sequence_length"]
    if not 0 <= product < MOST_TOKENS:
        raise UserInputError(f"{path}:{number}: {product:g} tokens in a step cannot be")
    tokens = round(product)
    asked = ("host_gib", "device_gib", "sequence_length", "chunk_tokens", "rounds", "sequences_per_step")
    return Imported(
        name=f"{path.stem} line {number}",
        params={"model_b": row["model_b"], **{name: row[name] for name in asked}},
        step_times_s=(row["step_s"],) if row["step_s"] > 0 else (),
        tokens_per_step=tokens,
        devices=1,
        feasible=row["step_s"] > 0,
        claims={name: row[name] for name in ("tokens_per_s", "tflops", "mfu", "hfu")} if row["step_s"] > 0 else {},
    )


FORMATS = (
    Format("benchmark of tprimat (JSON)", _is_tprimat, _read_tprimat),
    Format("results of ml_dataflow (CSV of 19 or 21 numbers a line)", _is_ml_dataflow, _read_ml_dataflow),
    Format(
        "log of Megatron-LM, Primus, Megatron-Bridge, NeMo or torchtitan",
        lambda path, _: is_log(path),
        read_log,
    ),
)


# ── plain values ──


def _bounded(file: Any, path: Path) -> Iterator[str]:
    """Its lines, none of which is longer than a line of numbers can be."""
    while line := file.readline(MOST_LINE):
        if len(line) == MOST_LINE:
            raise UserInputError(f"{path}: has a line of more than {MOST_LINE} characters")
        if not line.endswith(("\n", "\r")):  # a number that is cut is a number still
            raise UserInputError(f"{path}: its last line has no end, so it may be cut; end it if it is whole")
        if line.strip():
            yield line


def _mapping(plain: dict[str, Any], key: str) -> dict[str, Any]:
    found = plain.get(key)
    return found if isinstance(found, dict) else {}


def _whole(plain: dict[str, Any], key: str) -> int | None:
    return whole(plain.get(key))


def _time(value: object) -> float | None:
    """A number above zero."""
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value > 0
    return float(value) if good else None  # type: ignore[arg-type]


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
