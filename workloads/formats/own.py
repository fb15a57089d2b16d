"""Read and write this project's command for a fixed layout of `workload=parallel`."""

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, fields
from functools import cache
from typing import get_args, get_origin, get_type_hints

from workloads.api import registry
from workloads.api.errors import UserInputError
from workloads.api.validation import format_value
from workloads.formats import names
from workloads.formats.shell import Script
from workloads.formats.torchtitan import find_interval
from workloads.layouts.layout import LAYOUT_FIELDS, Job, Layout
from workloads.models.model import SIZES, Model, find_trained_name
from workloads.models.trained import load_trained_model

SCRIPT = "sweep.sh"
# Job or layout fields whose parameters in `workload=parallel` have different names.
RENAMED = {"compiled": "compile", "precision": "dtype"}
JOB_FIELDS = ("sequence_length", "precision", "state", "compiled", "document_tokens")
_OVERRIDE = re.compile(r"^\+{0,2}(?:space\.)?([\w.]+)=(.*)$")


def _list_obstacles(job: Job) -> Iterator[str]:
    layers = job.layout.checkpointed_layers
    if layers is not None and find_interval(job) is None:
        yield f"checkpointed_layers={layers} cannot be written: every n-th layer can"


@cache
def own_names() -> tuple[names.Name, ...]:
    """Return the parameters of `workload=parallel` that correspond to fields of a job or its layout."""
    parameters = {field.name: field.default for field in fields(registry.load("parallel").Parameters)}
    pairs = [(RENAMED.get(name, name), name) for name in (*_defaults(), "sequence_length")]
    return tuple(
        names.Name(parameter, name, parameters[parameter]) for parameter, name in pairs if parameter in parameters
    )


@cache
def own_support() -> names.Support:
    """Return the values that `workload=parallel` supports: its parameters' values, and the other fields' defaults."""
    hints = get_type_hints(registry.load("parallel").Parameters)
    parameters = {name.field: name.key for name in own_names()}
    values: dict[str, Sequence[object]] = {"sharding": ("none", "fsdp2")}
    for name, default in _defaults().items():
        if name not in parameters:
            values.setdefault(name, (default,))
        elif get_origin(hint := hints[parameters[name]]) is not None:  # a Literal
            values[name] = get_args(hint)
    del values["checkpointed_layers"]
    return names.Support("own", values, (_list_obstacles,))


def _defaults() -> dict[str, object]:
    of_job = {field.name: field.default for field in fields(Job) if field.name in JOB_FIELDS}
    of_layout = {field.name: field.default for field in fields(Layout) if field.name in LAYOUT_FIELDS}
    return {name: default for name, default in (of_job | of_layout).items() if default is not MISSING}


def render(job: Job, gpus: int, path: str = "") -> names.RenderedFile:
    """Return the command for a canonical job. Raises UserInputError if no command can express the job."""
    name = find_trained_name(job.model) or (path if path.endswith(".json") else None)
    if name is None:
        raise UserInputError("own: no model that workload=parallel trains (conf/model) has these sizes")
    values = {"model": name, **names.write_names(job, own_names())}
    values |= {"checkpointing_freq": interval} if (interval := find_interval(job)) else {}
    values |= {"imbalance": 1} if job.model.experts and job.expert_loads == "equal" else {}
    words = ["workload=parallel", *(f"space.{name}={format_value(value)}" for name, value in values.items())]
    words = ["python", "-m", "sweeper", *words, f"gpus={gpus}", "search=grid", "finals.top=0"]
    return names.RenderedFile(SCRIPT, f"#!/bin/sh\nexec {shlex.join(words)}\n", f"sh {SCRIPT}")


def recognizes(text: str) -> bool:
    return "-m sweeper " in text and "workload=" in text


def read(text: str, gpus: int | None = None, model: Model | None = None) -> names.FileReading:
    """Read a command and fill in defaults. Raises UserInputError if a key of the layout has several values."""
    words = [word for command in Script(text).read() for word in command]
    given = [match for word in words if (match := _OVERRIDE.match(word))]
    texts, written = {match[1]: match[2] for match in given}, {match[1]: match[0] for match in given}
    workload = texts.get("workload")
    if workload != "parallel":
        raise UserInputError(f"workload={workload}: only parallel has a layout")
    needed = {name.key for name in own_names() if name.default is not None}
    for name, value in texts.items():
        if "," in value or (name in needed and (value in ("", "null", "None") or value.startswith("-"))):
            raise UserInputError(f"{written[name]}: a layout needs one value")
    values = {name: names.parse_scalar(value) for name, value in texts.items()}
    model = load_trained_model(texts.get("model", "llama3_8b"))
    read = names.read_names(values, own_names(), [name.field for name in own_names()])
    of_job = {name: read.pop(name) for name in JOB_FIELDS if name in read}
    if (interval := int(values.get("checkpointing_freq", 1))) > 1:
        read["checkpointed_layers"] = model.layers // interval
    layout = names.canonical_layout(Layout(**read), model.layers)
    known = {name.key: name.field for name in own_names()} | {"model": "model", "checkpointing_freq": ""}
    known |= {"gpus": "gpus", "block": "manual_backward", "layers": "model"}
    known |= dict.fromkeys(("workload", "search", "finals.top"), "")
    gpus, layers = (values[name] if isinstance(values.get(name), int) else None for name in ("gpus", "layers"))
    others: dict[str, object] = {"manual_backward": True} if values.get("block") == "manual" else {}
    if model.experts and values.get("imbalance") in (None, 1, "1.0"):
        others["expert_loads"] = "equal" if values.get("imbalance") else "natural"
        known["imbalance"] = ""
    return names.FileReading(
        "own",
        layout,
        model=model,
        sizes={name: getattr(model, name) for name in SIZES} | ({"layers": layers} if layers else {}),
        taken={name: (known[name], text) for name, text in texts.items() if known.get(name)},
        left=tuple(name for name in texts if name not in known),
        others=others,
        gpus=gpus,
        **of_job,
    )
