"""Detect and read the supported file formats. Values missing from a file stay unknown."""

import csv
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sweeper.commands.ingest.imported import MAX_COUNT, Claims, ImportedResult, as_device_count, as_positive_int
from sweeper.commands.ingest.logs import is_log, read_log
from workloads.api.errors import UserInputError
from workloads.formats.log_formats import FORMATS as LOG_FORMATS
from workloads.tables import read_toml

HEAD_BYTES = 8192  # number of bytes at the start of a file from which the format is detected

_NAMES: dict[str, Any] = read_toml(__file__, "readers.toml")

MAX_JSON_BYTES = 64 * 2**20
GIB_PER_GB = 1e9 / 2**30
TRAINING, DEGREES, CLAIMS = (_NAMES["tprimat"][name] for name in ("training", "degrees", "claims"))

MAX_LINE_LENGTH = 4096
ML_DATAFLOW: dict[str, Any] = _NAMES["ml_dataflow"]
COLUMNS: list[str] = ML_DATAFLOW["columns"]
OLDER_COLUMNS = [name for name in COLUMNS if not name.startswith("used_")]
COLUMNS_BY_COUNT = {len(columns): columns for columns in (COLUMNS, OLDER_COLUMNS)}
# ml_dataflow's 1B and 8B models are Llama 3 with our FLOPs per token. Our catalog lacks the 15B and 32B models.
MODELS = {1.0: "llama3_1b", 8.0: "llama3_8b"}


class Format(NamedTuple):
    name: str
    # takes a path and the first `HEAD_BYTES` of the file's text; returns whether the file has this format
    recognizes: Callable[[Path, str], bool]
    read: Callable[[Path], Iterator[ImportedResult]]  # yields the results of a file


def detect_format(path: Path, formats: Sequence[Format] | None = None) -> Format:
    """Detect a file's format, one of `formats` (by default all). Raises UserInputError if it has none of them."""
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
    formats = formats or FORMATS
    for file_format in formats:
        if file_format.recognizes(path, text):
            return file_format
    supported = "; ".join(file_format.name for file_format in formats)
    other = "; sweeper diagnose reads steps such as `step 7 80 ms/step` of any program"
    raise UserInputError(f"{path}: unknown format. Supported: {supported}{other}")


def is_tprimat(_: Path, head: str) -> bool:
    """Return whether a file that starts with `head` is a tprimat benchmark."""
    is_object = head.lstrip().startswith("{")
    return is_object and '"platform"' in head and ('"gpu_info"' in head or '"training_config"' in head)


def read_tprimat(path: Path) -> Iterator[ImportedResult]:
    """Yield the only result of a benchmark file. The older schema has `raw_step_times` instead of `step_times`."""
    if path.stat().st_size > MAX_JSON_BYTES:
        size_mib = path.stat().st_size / 2**20
        raise UserInputError(f"{path}: has {size_mib:.0f} MiB; a tprimat benchmark has at most 64 MiB")
    try:
        content: dict[str, Any] = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise UserInputError(f"{path}: is truncated or not JSON ({error})") from error
    values = content.get("step_times", content.get("raw_step_times"))
    times = [_as_positive_float(value) for value in values] if isinstance(values, list) else []
    times_s = tuple(time_s for time_s in times if time_s is not None)
    if not times_s or len(times_s) < len(times):
        raise UserInputError(f"{path}: has no list of positive step times (step_times or raw_step_times)")
    names = ("gpu_info", "training_config", "performance_metrics", "memory_metrics")
    gpu, training, performance, memory = (_get_mapping(content, name) for name in names)
    configured = [(training, name, ours) for name, ours in TRAINING.items()]
    configured += [(_get_mapping(content, "parallelism_config"), name, ours) for name, ours in DEGREES.items()]
    params = {ours: value for section, name, ours in configured if (value := as_positive_int(section.get(name)))}
    claims = {
        ours: factor * claimed
        for name, (ours, factor) in CLAIMS.items()
        if (claimed := _as_positive_float(performance.get(name)))
    }
    peak_gb = _as_positive_float(memory.get("peak_memory_allocated_gb"))  # in GB of 10^9 bytes
    yield ImportedResult(
        name=path.stem,
        params=params,
        step_times_s=times_s,
        tokens_per_step=params.get("global_batch", 0) * params.get("sequence_length", 0),
        devices=as_device_count(training.get("num_gpus")),
        device=str(gpu.get("device_name", "")),
        claims=Claims(claims, times_s[1:], "mean"),  # tprimat's means exclude the first step
        metrics={"peak_memory_gib": peak_gb * GIB_PER_GB} if peak_gb else {},
        machine_info={
            "torch": gpu.get("pytorch_version", ""),
            "software": gpu.get("software_stack", ""),
            "timestamp": content.get("timestamp", ""),
        },
        contradictions=tuple(_find_contradictions(content, len(times_s))),
    )


def _find_contradictions(content: dict[str, Any], steps: int) -> Iterator[str]:
    training, layout = _get_mapping(content, "training_config"), _get_mapping(content, "parallelism_config")
    names = {training.get("parallel_strategy"), layout.get("strategy_name")} - {None, "unknown"}
    if len(names) > 1:
        yield f"the strategy has two names: {' and '.join(sorted(map(str, names)))}"
    claimed = as_positive_int(_get_mapping(content, "performance_metrics").get("total_steps"))
    if claimed is not None and claimed != steps:
        yield f"total_steps is {claimed}, but there are {steps} step times"
    degrees = [as_positive_int(layout.get(name)) for name in DEGREES]
    gpus = as_positive_int(training.get("num_gpus"))
    if gpus and all(degrees) and math.prod(degree or 1 for degree in degrees) != gpus:
        yield f"the parallel degrees {' x '.join(map(str, degrees))} do not give {gpus} GPUs"


def _get_mapping(content: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = content.get(key)
    return value if isinstance(value, dict) else {}


def _as_positive_float(value: object) -> float | None:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= sys.float_info.max:
        return float(value)
    return None


def is_ml_dataflow(path: Path, head: str) -> bool:
    """Return whether a file that starts with `head` contains ml_dataflow results."""
    cells = head.splitlines()[0].split(",")
    return path.suffix == ".csv" and len(cells) in COLUMNS_BY_COUNT and None not in map(_parse_number, cells)


def read_ml_dataflow(path: Path) -> Iterator[ImportedResult]:
    """Yield a result for each line: Llama training at a memory budget. A line of zeros marks an infeasible budget."""
    with path.open(newline="", errors="replace") as file:
        for line_number, cells in enumerate(csv.reader(_read_bounded_lines(file, path)), start=1):
            columns, place = COLUMNS_BY_COUNT.get(len(cells)), f"{path}:{line_number}"
            values = [value for cell in cells if (value := _parse_number(cell)) is not None]
            if columns is None or len(values) < len(columns):
                allowed = f"{len(COLUMNS)} or {len(OLDER_COLUMNS)} numbers"
                raise UserInputError(f"{place}: has {len(cells)} cells; allowed are {allowed}")
            row = dict(zip(columns, values, strict=True))
            tokens = row["sequences_per_step"] * row["sequence_length"]
            if not 0 <= tokens <= MAX_COUNT:
                raise UserInputError(f"{place}: {tokens:g} tokens per step; allowed are 0 to {MAX_COUNT:g}")
            feasible, model = row["step_s"] > 0, MODELS.get(row["model_b"])
            memory = {ours: row[name] for name, ours in ML_DATAFLOW["memory"].items() if row.get(name, 0.0) > 0}
            config = {name: row[name] for name in ("model_b", *ML_DATAFLOW["config"])}
            yield ImportedResult(
                name=f"{path.stem} line {line_number}",
                params={**({"model": model} if model else {}), "dtype": "bf16", **config},  # always bf16
                step_times_s=(row["step_s"],) if feasible else (),
                tokens_per_step=round(tokens),
                devices=1,
                feasible=feasible,
                claims=Claims({name: row[name] for name in ML_DATAFLOW["claims"]} if feasible else {}),
                metrics=memory if feasible else {},
            )


def _read_bounded_lines(file: Any, path: Path) -> Iterator[str]:
    while line := file.readline(MAX_LINE_LENGTH):
        if len(line) == MAX_LINE_LENGTH:
            raise UserInputError(f"{path}: has a line of more than {MAX_LINE_LENGTH} characters")
        if not line.endswith(("\n", "\r")):  # a truncated number would still be a valid number
            reason = "its last line has no newline, so it may be truncated; add one if it is complete"
            raise UserInputError(f"{path}: {reason}")
        if line.strip():
            yield line


def _parse_number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


LOGS = f"log of {', '.join(dict.fromkeys(row.program for row in LOG_FORMATS))}"
LOG_FORMAT = Format(LOGS, lambda path, _: is_log(path), read_log)
FORMATS = (
    Format("tprimat benchmark (JSON)", is_tprimat, read_tprimat),
    Format("ml_dataflow results (CSV of 19 or 21 numbers a line)", is_ml_dataflow, read_ml_dataflow),
    LOG_FORMAT,
)
