"""Read and write this project's command for a fixed layout: `workload=parallel`, or `workload=torchtitan`."""

import re
import shlex
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, fields
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from workloads.api import registry
from workloads.api.errors import UserInputError
from workloads.formats import names
from workloads.formats.shell import Script
from workloads.formats.torchtitan import find_interval
from workloads.layouts.layout import LAYOUT_FIELDS, Job, Layout
from workloads.models.model import SIZES, TRAINED_MODELS, Model, find_trained_name

SCRIPT = "sweep.sh"
# Job or layout fields whose parameters in `workload=parallel` have different names.
RENAMED = {"compiled": "compile", "precision": "dtype"}
JOB_FIELDS = ("sequence_length", "precision", "state", "compiled", "document_tokens")
# Fixed values of fields that have no parameter in `workload=parallel`, if they differ from the defaults.
FIXED = {"state": "bf16"}
_TITAN: dict[str, Any] = tomllib.loads(Path(__file__).with_name("own_torchtitan.toml").read_text())
TITAN_NAMES = names.read_table(_TITAN["names"])
TITAN_FIXED = ("dp_replicate", "ep", "schedule", "stages_per_rank", "checkpointed_layers", "tp_overlap", "cp_method")
_OVERRIDE = re.compile(r"^\+{0,2}(?:space\.)?([\w.]+)=(.*)$")


def _list_obstacles(job: Job) -> Iterator[str]:
    layout, reshards, layers = job.layout, job.layout.reshard_after_forward, job.layout.checkpointed_layers
    if layout.is_sharded and layout.sharding != "fsdp2":
        yield f"sharding={layout.sharding} cannot be written where dp_shard or cp is above 1. Supported: fsdp2"
    if job.trainer == "own" and layers is not None and find_interval(job) is None:
        yield f"checkpointed_layers={layers} cannot be written: every n-th layer can"
    if job.trainer != "own" and layout.is_sharded and reshards != (layout.pp == 1):
        yield f"reshard_after_forward={names.show(reshards)} cannot be written with pp={layout.pp}"


_AT_DEFAULTS = {name: (getattr(Layout(), name),) for name in TITAN_FIXED}
TITAN = names.Support("workload=torchtitan", _AT_DEFAULTS | _TITAN["supported"], (_list_obstacles,))


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
            values.setdefault(name, (FIXED.get(name, default),))
        elif get_origin(hint := hints[parameters[name]]) is not None:  # a Literal
            values[name] = get_args(hint)
    del values["checkpointed_layers"]
    return names.Support("own", values, (_list_obstacles,))


def _defaults() -> dict[str, object]:
    of_job = {field.name: field.default for field in fields(Job) if field.name in JOB_FIELDS}
    of_layout = {field.name: field.default for field in fields(Layout) if field.name in LAYOUT_FIELDS}
    return {name: default for name, default in (of_job | of_layout).items() if default is not MISSING}


def render(job: Job, gpus: int) -> names.RenderedFile:
    """Return the command for a canonical job. Raises UserInputError if no command can express the job."""
    notes: tuple[str, ...] = ()
    if job.trainer not in ("own", "torchtitan"):
        raise UserInputError(f"own: no command fixes a whole layout of {job.trainer}. Supported: own, torchtitan")
    (own_support() if job.trainer == "own" else TITAN).check(job)
    name = find_trained_name(job.model)
    if name is None:
        raise UserInputError(
            "own: model is none of this project's catalogue (conf/model), which `workload=parallel` trains"
        )
    if job.trainer == "own":
        values = {"model": name, **names.write_names(job, own_names())}
        values |= {"checkpointing_freq": interval} if (interval := find_interval(job)) else {}
        words = ["workload=parallel"]
    else:
        if name != "llama3_8b":
            raise UserInputError("workload=torchtitan: model cannot be written. Supported: llama3_8b")
        values, words = names.write_names(job, TITAN_NAMES), ["workload=torchtitan"]
        notes = ("space.assets and space.dataset_path are folders of yours",)
    words += [f"space.{name}={names.show(value)}" for name, value in values.items()]
    words = ["python", "-m", "sweeper", *words, f"gpus={gpus}", "search=grid", "finals.top=0"]
    return names.RenderedFile(SCRIPT, f"#!/bin/sh\nexec {shlex.join(words)}\n", f"sh {SCRIPT}", notes)


def recognizes(text: str) -> bool:
    return "-m sweeper " in text and "workload=" in text


def read(text: str, gpus: int | None = None, model: Model | None = None) -> names.FileReading:
    """Read a command and fill in defaults. Raises UserInputError if a key of the layout has several values."""
    words = [word for command in Script(text).read() for word in command]
    texts = {match[1]: match[2] for word in words if (match := _OVERRIDE.match(word))}
    workload = texts.get("workload")
    if workload not in ("parallel", "torchtitan"):
        raise UserInputError(f"workload={workload}: only parallel and torchtitan have a layout")
    needed = {name.key for name in (*own_names(), *TITAN_NAMES) if name.default is not None}
    for name, value in texts.items():
        if "," in value or (name in needed and (value in ("", "null", "None") or value.startswith("-"))):
            raise UserInputError(f"space.{name}={value}: a layout needs one value")
    values = {name: names.parse_scalar(value) for name, value in texts.items()}
    if workload == "torchtitan":
        tp, cp, pp = (int(values.get(name) or 1) for name in ("tp", "cp", "pp"))
        all_gpus = values["gpus"] if isinstance(values.get("gpus"), int) else gpus or 1
        dp_shard = all_gpus // (tp * cp * pp)
        reshard = dp_shard * cp == 1 or pp == 1  # torchtitan's fsdp_reshard_after_forward=default
        values |= {"dp_shard": dp_shard, "dtype": values.get("precision", "bf16"), "reshard_after_forward": reshard}
        values |= names.read_names(values, TITAN_NAMES, ("state",))
    model = TRAINED_MODELS.get(texts.get("model", "llama3_8b"))
    if model is None:
        raise UserInputError(f"space.model={texts['model']}: unknown model")
    read = names.read_names(values, own_names(), [name.field for name in own_names()])
    of_job = {name: read.pop(name) for name in JOB_FIELDS if name in read}
    if (interval := int(values.get("checkpointing_freq", 1))) > 1:
        read["checkpointed_layers"] = model.layers // interval
    trainer = "own" if workload == "parallel" else "torchtitan"
    layout = names.canonical_layout(Layout(**read), model.layers)
    table = TITAN_NAMES if workload == "torchtitan" else own_names()
    known = {name.key: name.field for name in table if name.field} | {"model": "model", "checkpointing_freq": ""}
    known |= dict.fromkeys(("workload", "gpus", "search", "finals.top"), "")
    return names.FileReading(
        trainer,
        layout,
        model=model,
        sizes={name: getattr(model, name) for name in SIZES},
        taken={name: (known[name], text) for name, text in texts.items() if known.get(name)},
        left=tuple(name for name in texts if name not in known),
        **(FIXED | of_job),
    )
