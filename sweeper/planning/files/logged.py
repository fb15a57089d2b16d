"""The configuration that a trainer's log has: torchtitan's JSON, the arguments of Megatron-LM and programs on it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

from sweeper.common.errors import UserInputError
from sweeper.planning.files.megatron import parse_value
from sweeper.planning.files.megatron_reading import read_settings
from sweeper.planning.files.megatron_settings import Settings
from sweeper.planning.files.rendering import FileReading
from sweeper.planning.files.torchtitan_reading import read_config
from workloads.api.log_names import strip_colours

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
    return read_settings(read_arguments(text), "megatron", gpus)


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
