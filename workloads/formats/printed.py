"""Read the batch, model, layout and data type that a trainer prints.

`workloads.formats.logs` reads a log's steps. This module reads values from the same lines, for comparison with declared
values. It reads lines of Megatron-LM, Primus, Megatron-Bridge, NeMo, torchtitan, DeepSpeed and Hugging Face's Trainer,
and plain `name: value` lines. If a program prints its whole configuration, the module reads it as a layout:
torchtitan's JSON, or the arguments of Megatron-LM and of programs built on Megatron-LM.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from workloads.api.errors import UserInputError
from workloads.formats import megatron, torchtitan
from workloads.formats.logs import ARGUMENT, DTYPES, TITAN_MESH, WORLD_SIZE, strip_colors
from workloads.formats.megatron_files import parse_value
from workloads.formats.names import FileReading
from workloads.layouts.layout import Layout
from workloads.models.model import Model
from workloads.tables import read_toml

Printed = int | str

LONGEST_LINE = 4096  # characters; the rest of a longer line is ignored
_TABLE = read_toml(__file__, "printed.toml")
_KEYS = [(name.key.rpartition(".")[2].replace("_", " "), name.field) for name in (*megatron.NAMES, *torchtitan.NAMES)]
NUMBERS = {
    field: {*(key for key, meaning in _KEYS if meaning == field), *others}
    for field, others in _TABLE["numbers"].items()
}
GROUP_RANKS: dict[str, str] = _TABLE["group_ranks"]
_DTYPE = "|".join(sorted(map(re.escape, DTYPES), key=len, reverse=True))
ALWAYS = ("sharding", "checkpointing")
# If one of these is missing, Megatron-LM's default is used, which can be wrong if the log is incomplete.
DECISIVE = ("tensor_model_parallel_size", "use_distributed_optimizer", "recompute_granularity", "bf16")
_LINES = {name: re.compile(pattern) for name, pattern in _TABLE["lines"].items()}
UNKNOWN_LAYERS = ("multi_latent_attention", "hybrid_override_pattern", "hybrid_layer_pattern", "linear_attention_freq")

_NAMED = (f"(?P<{name}>{'|'.join(keys).replace(' ', '[_ -]')})" for name, keys in NUMBERS.items())
_NUMBER = re.compile(_TABLE["number"].replace("NAMES", "|".join(_NAMED)))
_NUMBER_LINES = [(text, re.compile(pattern), names.split()) for text, pattern, names in _TABLE["number_lines"]]
_TEXT_LINES = [
    (text, re.compile(pattern.replace("DTYPE", _DTYPE)), *others) for text, pattern, *others in _TABLE["text_lines"]
]
_GROUP_RANKS = re.compile(rf"All ({'|'.join(GROUP_RANKS)}) parallel group ranks: \[\[([\d, ]+)\]")


def read_printed(line: str) -> dict[str, Printed]:
    if not _LINES["hint"].search(line):
        return {}
    line = strip_colors(line[:LONGEST_LINE]).rstrip()
    line = _LINES["prefix"].sub("", line)
    printed: dict[str, Printed] = {}
    for match in _NUMBER.finditer(line):
        number = int(match["value"].replace(",", ""))
        if number > 0:  # -1: the program chooses the value
            printed[next(name for name in NUMBERS if match[name])] = number
    for text, pattern, names in _NUMBER_LINES:
        if text in line and (found := pattern.search(line)):
            numbers = [int(group.replace(",", "")) for group in found.groups()]
            printed |= dict(zip(names, numbers, strict=True))
            if "dp_shard" in names:  # a device mesh covers all GPUs
                printed["gpus"] = math.prod(numbers)
    for match in _GROUP_RANKS.finditer(line):
        printed[GROUP_RANKS[match[1]]] = len(match[2].split(","))
    for text, pattern, name, value in _TEXT_LINES:
        if text in line and (found := pattern.search(line)):
            group = found[1].replace(" ", "_")
            is_prefix = value == "fp8_"
            printed[name] = f"fp8_{group.replace('_with', '')}" if is_prefix else value or DTYPES.get(group, group)
    return printed


def add_printed(known: dict[str, list[Printed]], printed: Mapping[str, Printed]) -> None:
    """Add the printed values, keyed by this project's names, that are not known yet."""
    for name, value in printed.items():
        if value not in known.setdefault(name, []):
            known[name].append(value)


def has_configuration(text: str) -> bool:
    return _LINES["titan_start"].search(text) is not None or bool(read_arguments(text))


def read_configuration(text: str, gpus: int | None = None, model: Model | None = None) -> FileReading:
    """Read the configuration of the first start in a log. Raises UserInputError for a value that no job can have."""
    if _LINES["titan_start"].search(text):
        reading = torchtitan.read_config(_read_json(text), _read_mesh_gpus(text) or gpus, model)
        reading = replace(reading, left=())
        # Versions before 0.1 have no converters.
        is_fp8 = reading.precision == "bf16" and _LINES["titan_fp8"].search(text)
        return replace(reading, precision="fp8_tensorwise") if is_fp8 else reading
    settings = read_arguments(text)
    if settings.get("num_experts", 0) is None:
        settings["num_experts"] = 0  # a dense model
    # A log lists all settings of a program, mostly defaults, so a list of unread settings would not help the user.
    reading = replace(megatron.read_settings(settings, "megatron", gpus, model), left=())
    if missing := [name for name in DECISIVE if name not in settings]:
        note = f"not in the log, so Megatron-LM's default is taken: {', '.join(missing)}"
        return replace(reading, notes=(*reading.notes, note))
    return reading


def read_printed_layout(text: str, gpus: int | None = None) -> dict[str, object]:
    """Return the layout fields that the configuration in a log sets explicitly, excluding the program's defaults.

    Fields at the layout's default are omitted, except those in `ALWAYS`. Raises UserInputError for impossible values.
    """
    if not has_configuration(text) or (gpus is None and _read_mesh_gpus(text) is None):
        return {}
    settings = _read_json(text) if _LINES["titan_start"].search(text) else read_arguments(text)
    fields = [field for field, names in _TABLE["printed_by"].items() if not settings.keys().isdisjoint(names)]
    layout = read_configuration(text, gpus).layout if fields else None
    values = {field: getattr(layout, field) for field in fields}
    return {name: value for name, value in values.items() if name in ALWAYS or value != getattr(Layout(), name)}


def read_model(text: str) -> Model | None:
    """Return the model that Megatron-LM's arguments or the YAML of a program built on Megatron-LM describe, or None.

    Raises UserInputError if the model has layers with operations that this project does not know.
    """
    settings = read_arguments(text)
    if "num_layers" not in settings:
        settings = {}
        for line in text.splitlines():
            if match := _LINES["yaml_entry"].match(strip_colors(line)):
                settings.setdefault(_TABLE["yaml_names"].get(match[1], match[1]), parse_value(match[2]))
        shared = settings.get("share_embeddings_and_output_weights")
        settings["group_query_attention"] = bool(settings.get("num_query_groups"))
        settings.setdefault("untie_embeddings_and_output_weights", shared is False)
        settings["swiglu"] = bool(settings.get("swiglu")) or settings.get("activation") == "fast-swiglu"
        settings.setdefault("position_embedding_type", "rope")
    if unknown := [name for name in UNKNOWN_LAYERS if settings.get(name)]:
        raise UserInputError(f"{unknown[0]}={settings[unknown[0]]}: the operations of such layers are not known here")
    if not settings.get("vocab_size"):
        settings["vocab_size"] = settings.get("padded_vocab_size")
    return megatron.read_model({"tokenizer_type": "", **settings})


def read_arguments(text: str) -> dict[str, Any]:
    """Return the first value of each argument in a log, from lines such as `  bf16 ....... True`."""
    settings: dict[str, Any] = {}
    for line in text.splitlines():
        line = strip_colors(line)
        if (match := ARGUMENT.search(line)) and "[config.py:" not in line:  # DeepSpeed's own settings
            settings.setdefault(match[1], parse_value(match[2]))
        elif match := WORLD_SIZE.search(line):
            settings.setdefault("world_size", int(match[1]))
    return settings


def _read_json(text: str) -> dict[str, Any]:
    lines = [strip_colors(line).rstrip() for line in text.splitlines()]
    start = next(number for number, line in enumerate(lines) if _LINES["titan_start"].search(line))
    matches = [_LINES["entry"].match(line) for line in lines[start + 1 :]]
    body = "\n".join(["{", *(match[1] for match in matches if match)])
    try:
        config: dict[str, Any] = json.JSONDecoder().raw_decode(body)[0]
    except json.JSONDecodeError as error:
        raise UserInputError(f"the configuration in the log is not whole: {error}") from error
    return config


def _read_mesh_gpus(text: str) -> int | None:
    """Return the product of the device mesh's degrees except `ep`, whose ranks are already in the other degrees."""
    for line in text.splitlines():
        if match := TITAN_MESH.search(strip_colors(line)):
            degrees = {name: int(degree) for name, degree in re.findall(r"(\w+)=(\d+)", match[1])}
            return math.prod(degrees.get(name, 1) for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp"))
    return None
