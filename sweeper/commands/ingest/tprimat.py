"""Read tprimat's benchmarks: a JSON file, one result."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sweeper.commands.ingest.imported import Claims, ImportedResult, as_device_count, as_positive_int
from workloads.api.errors import UserInputError

MAX_JSON_BYTES = 64 * 2**20
GIB_PER_GB = 1e9 / 2**30
CONFIG = {
    "training_config": {
        "sequence_length": "sequence_length",
        "global_batch_size": "global_batch",
        "micro_batch_size": "micro_batch",
    },
    "parallelism_config": {
        "tensor_model_parallel_size": "tp",
        "pipeline_model_parallel_size": "pp",
        "data_parallel_size": "dp",
    },
}
CLAIMS = {
    "tokens_per_second": ("tokens_per_s", 1.0),
    "tokens_per_second_per_gpu": ("tokens_per_s_per_gpu", 1.0),
    "avg_step_time_seconds": ("step_time_ms", 1e3),
}


def is_tprimat(_: Path, head: str) -> bool:
    """Return whether a file with this beginning is one of tprimat's benchmarks."""
    return (
        head.lstrip().startswith("{") and '"platform"' in head and ('"gpu_info"' in head or '"training_config"' in head)
    )


def read_tprimat(path: Path) -> Iterator[ImportedResult]:
    """Yield the one result of a benchmark. The older schema has `raw_step_times` for `step_times`."""
    content = _load(path)
    times_s = _read_times(path, content)
    gpu, training = _get_mapping(content, "gpu_info"), _get_mapping(content, "training_config")
    params = _read_config(content)
    yield ImportedResult(
        name=path.stem,
        params=params,
        step_times_s=times_s,
        tokens_per_step=params.get("global_batch", 0) * params.get("sequence_length", 0),
        devices=as_device_count(training.get("num_gpus")),
        device=str(gpu.get("device_name", "")),
        # Its means are of the steps after the first.
        claims=Claims(_read_claims(content), times_s[1:], "mean"),
        metrics=_read_memory(content),
        machine_info={
            "torch": gpu.get("pytorch_version", ""),
            "software": gpu.get("software_stack", ""),
            "timestamp": content.get("timestamp", ""),
        },
        contradictions=tuple(_find_contradictions(content, len(times_s))),
    )


def _load(path: Path) -> dict[str, Any]:
    if path.stat().st_size > MAX_JSON_BYTES:
        size_mib = path.stat().st_size / 2**20
        raise UserInputError(f"{path}: has {size_mib:.0f} MiB; a tprimat benchmark has at most 64 MiB")
    try:
        content: dict[str, Any] = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise UserInputError(f"{path}: is truncated or not JSON ({error})") from error
    return content


def _read_times(path: Path, content: dict[str, Any]) -> tuple[float, ...]:
    values = content.get("step_times", content.get("raw_step_times"))
    times_s = [_as_positive_float(value) for value in values] if isinstance(values, list) else []
    if not times_s or None in times_s:
        raise UserInputError(f"{path}: has no list of positive step times (step_times or raw_step_times)")
    return tuple(time_s for time_s in times_s if time_s)


def _read_config(content: dict[str, Any]) -> dict[str, int]:
    params = {
        ours: as_positive_int(_get_mapping(content, section).get(name))
        for section, names in CONFIG.items()
        for name, ours in names.items()
    }
    return {name: value for name, value in params.items() if value is not None}


def _read_claims(content: dict[str, Any]) -> dict[str, float]:
    performance = _get_mapping(content, "performance_metrics")
    claims = {ours: (_as_positive_float(performance.get(name)), factor) for name, (ours, factor) in CLAIMS.items()}
    return {name: factor * value for name, (value, factor) in claims.items() if value}


def _read_memory(content: dict[str, Any]) -> dict[str, float]:
    """Return the most memory allocated; tprimat's GB are 10^9 bytes."""
    peak_gb = _as_positive_float(_get_mapping(content, "memory_metrics").get("peak_memory_allocated_gb"))
    return {"peak_memory_gib": peak_gb * GIB_PER_GB} if peak_gb else {}


def _find_contradictions(content: dict[str, Any], steps: int) -> Iterator[str]:
    training, layout = _get_mapping(content, "training_config"), _get_mapping(content, "parallelism_config")
    names = {training.get("parallel_strategy"), layout.get("strategy_name")} - {None, "unknown"}
    if len(names) > 1:
        yield f"the strategy has two names: {' and '.join(sorted(map(str, names)))}"
    claimed = as_positive_int(_get_mapping(content, "performance_metrics").get("total_steps"))
    if claimed is not None and claimed != steps:
        yield f"total_steps is {claimed}, but there are {steps} step times"
    degrees = [as_positive_int(layout.get(name)) for name in CONFIG["parallelism_config"]]
    gpus = as_positive_int(training.get("num_gpus"))
    if gpus and all(degrees) and math.prod(degree or 1 for degree in degrees) != gpus:
        yield f"the parallel degrees {' x '.join(map(str, degrees))} do not give {gpus} GPUs"


def _get_mapping(content: dict[str, Any], key: str) -> dict[str, Any]:
    value = content.get(key)
    return value if isinstance(value, dict) else {}


def _as_positive_float(value: object) -> float | None:
    """Return a finite number above zero as a float, else None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:  # an integer of more than 308 digits
        return None
    return number if 0 < number < math.inf else None
