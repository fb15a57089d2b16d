"""The configuration that a trainer's log has: torchtitan's JSON, the arguments of Megatron-LM and programs on it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

from workloads.api.errors import UserInputError
from workloads.formats.log_names import strip_colours
from workloads.formats.megatron import parse_value
from workloads.formats.megatron_reading import read_settings
from workloads.formats.megatron_settings import Settings
from workloads.formats.rendering import FileReading
from workloads.formats.torchtitan_reading import read_config
from workloads.layouts.job import TrainingLayout

# The settings of Megatron-LM, or the section of torchtitan's configuration, that say a field of a layout.
PRINTED_BY = {
    "sharding": {"use_distributed_optimizer", "parallelism"},
    "reshard_after_forward": {"torch_fsdp2_reshard_after_forward", "parallelism"},
    "ep": {"expert_model_parallel_size", "parallelism"},
    "checkpointing": {"recompute_granularity", "activation_checkpoint"},
    "checkpointed_layers": {"recompute_granularity", "activation_checkpoint"},
    "stages_per_rank": {"virtual_pipeline_model_parallel_size", "parallelism"},
    "schedule": {"virtual_pipeline_model_parallel_size", "parallelism"},
    "sequence_parallel": {"sequence_parallel", "parallelism"},
    "cp_method": {"cp_comm_type", "parallelism"},
}
ALWAYS = ("sharding", "checkpointing")
# Without one of these, Megatron-LM's default for it is taken, which a log that is not whole may differ from.
DECISIVE = ("tensor_model_parallel_size", "use_distributed_optimizer", "recompute_granularity", "bf16")
_ARGUMENT = re.compile(r"(?:^|\s)(\w+) \.{3,} (\S.*?)\s*$")
_WORLD_SIZE = re.compile(r"\busing world size: (\d+)")
_TITAN_START = re.compile(r"Running with (?:args|configs?): \{")
_TITAN_FP8 = re.compile(r"Swapped to Float8\w*Linear|Float8 tensorwise scaled training active")
_TITAN_MESH = re.compile(r"device mesh with parallelism: (.+)$")
# A line of JSON behind what a launcher writes: an entry, a bracket, or a member of a list.
_ENTRY = re.compile(r"""^(?:.*?[^ ])?? *("\w+": .+|[{}\]]+,?|"[^"]*",?|-?[\d.]+,?)$""")


def recognises(text: str) -> bool:
    """Return whether a text is a log with a configuration."""
    return _TITAN_START.search(text) is not None or bool(read_arguments(text))


def read(text: str, gpus: int | None = None) -> FileReading:
    """Return what the configuration of a log says; that of its first start.

    Raises:
        UserInputError: a value that no job has, or the number of GPUs is missing.
    """
    if _TITAN_START.search(text):
        reading = read_config(_read_json(text), _read_mesh_gpus(text) or gpus)
        is_fp8 = reading.precision == "bf16" and _TITAN_FP8.search(text)  # versions before 0.1 have no converters
        return replace(reading, precision="fp8_tensorwise") if is_fp8 else reading
    settings = read_arguments(text)
    reading = read_settings(settings, "megatron", gpus)
    if missing := [name for name in DECISIVE if name not in settings]:
        note = f"not in the log, so Megatron-LM's default is taken: {', '.join(missing)}"
        return replace(reading, notes=(*reading.notes, note))
    return reading


def read_printed_layout(text: str, gpus: int | None = None) -> dict[str, object]:
    """Return the fields of a layout that the configuration of a log says itself, without defaults of the program.

    A field that no layout has to have, such as the schedule of a pipeline, is left out at its default.

    Raises:
        UserInputError: a value that no job has.
    """
    if not recognises(text) or (gpus is None and _read_mesh_gpus(text) is None):
        return {}
    settings = _read_json(text) if _TITAN_START.search(text) else read_arguments(text)
    fields = [field for field, names in PRINTED_BY.items() if names & settings.keys()]
    layout = read(text, gpus).layout if fields else None
    values = {field: getattr(layout, field) for field in fields}
    default = TrainingLayout()
    return {name: value for name, value in values.items() if name in ALWAYS or value != getattr(default, name)}


def read_arguments(text: str) -> Settings:
    """Return the arguments that a log lists, such as `  bf16 ....... True`; the first value of each."""
    settings: Settings = {}
    for line in text.splitlines():
        line = strip_colours(line)
        if (match := _ARGUMENT.search(line)) and "[config.py:" not in line:  # DeepSpeed prints its own
            settings.setdefault(match[1], parse_value(match[2]))
        elif match := _WORLD_SIZE.search(line):
            settings.setdefault("world_size", int(match[1]))
    return settings


def _read_json(text: str) -> dict[str, Any]:
    """Return the JSON that torchtitan logs over several lines."""
    lines = [strip_colours(line).rstrip() for line in text.splitlines()]
    start = next(number for number, line in enumerate(lines) if _TITAN_START.search(line))
    matches = [_ENTRY.match(line) for line in lines[start + 1 :]]
    body = "\n".join(["{", *(match[1] for match in matches if match)])
    try:
        config: dict[str, Any] = json.JSONDecoder().raw_decode(body)[0]
    except json.JSONDecodeError as error:
        raise UserInputError(f"the configuration in the log is not whole: {error}") from error
    return config


def _read_mesh_gpus(text: str) -> int | None:
    """Return the product of the degrees of the device mesh; expert parallel ranks are some of the others."""
    for line in text.splitlines():
        if match := _TITAN_MESH.search(strip_colours(line)):
            degrees = {name: int(degree) for name, degree in re.findall(r"(\w+)=(\d+)", match[1])}
            product = 1
            for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp"):
                product *= degrees.get(name, 1)
            return product
    return None
