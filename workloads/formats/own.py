"""This project's own command with a layout fixed: `workload=parallel`, or `workload=torchtitan` for that trainer."""

from __future__ import annotations

import re
import shlex
from dataclasses import MISSING, fields
from functools import cache
from typing import Any, get_args, get_origin, get_type_hints

from workloads.api import registry
from workloads.api.errors import UserInputError
from workloads.formats.rendering import FileReading, RenderedFile, Support, canonical_layout
from workloads.formats.torchtitan_rules import find_interval
from workloads.layouts.job import Job, TrainingLayout
from workloads.models.model import TRAINED_MODELS, Model, find_trained_name

NAME = "sweep.sh"
# Parameters of `workload=parallel` by the name of a job's or a layout's field, where the names differ.
RENAMED = {"compiled": "compile", "precision": "dtype"}
JOB_FIELDS = ("sequence_length", "precision", "state", "compiled", "document_tokens")
# The one value of a field that `workload=parallel` has no parameter for, where it is not a layout's default.
FIXED = {"state": "bf16"}


def _check_sharding(job: Job) -> str:
    layout = job.layout
    if layout.dp_shard * layout.cp == 1 or layout.sharding == "fsdp2":
        return ""
    return f"sharding={layout.sharding} cannot be written where dp_shard or cp is above 1. Supported: fsdp2"


def _check_reshard(job: Job) -> str:
    layout = job.layout
    if layout.dp_shard * layout.cp == 1 or layout.reshard_after_forward == (layout.pp == 1):
        return ""
    return f"reshard_after_forward={str(layout.reshard_after_forward).lower()} cannot be written with pp={layout.pp}"


def _check_checkpointed_layers(job: Job) -> str:
    layers = job.layout.checkpointed_layers
    if layers is None or find_interval(job) is not None:
        return ""
    return f"checkpointed_layers={layers} cannot be written: every n-th layer can"


# What conf/workload/torchtitan.yaml leaves at one value.
TITAN = Support(
    "workload=torchtitan",
    {
        "dp_replicate": (1,),
        "ep": (1,),
        "schedule": ("1f1b",),
        "stages_per_rank": (1,),
        "state": ("fp32", "bf16"),
        "checkpointing": ("none", "full"),
        "checkpointed_layers": (None,),
        "reshard_after_forward": (True, False),
        "tp_overlap": ("none",),
        "cp_method": ("allgather",),
        "sharding": ("none", "fsdp2"),
        "precision": ("bf16", "fp8_tensorwise"),
        "offload_optimizer": (False,),
        "sequence_parallel": (True,),
        "document_tokens": (0,),
    },
    (_check_sharding, _check_reshard),
)
TITAN_WEIGHTS = {"fp32": "float32", "bf16": "bfloat16"}
TITAN_NAMES = ("global_batch", "tp", "pp", "cp", "micro_batch", "checkpointing")
_OVERRIDE = re.compile(r"^\+{0,2}(?:space\.)?([\w.]+)=(.*)$")


def render(job: Job, gpus: int) -> RenderedFile:
    """Return the command of a canonical job: of `workload=parallel`, or of its trainer's preset.

    Raises:
        UserInputError: it cannot express the job.
    """
    builders = {"own": _build_parallel, "torchtitan": _build_torchtitan}
    if job.trainer not in builders:
        raise UserInputError(f"own: no command fixes a whole layout of {job.trainer}. Supported: {', '.join(builders)}")
    words = ["python", "-m", "sweeper", *builders[job.trainer](job), f"gpus={gpus}", "search=grid", "finals.top=0"]
    notes = ("space.assets and space.dataset_path are folders of yours",) if job.trainer == "torchtitan" else ()
    return RenderedFile(NAME, f"#!/bin/sh\nexec {shlex.join(words)}\n", f"sh {NAME}", notes)


def _build_parallel(job: Job) -> list[str]:
    own_support().check(job)
    values = {"model": _name_of(job.model)} | {
        parameter: getattr(job if name in JOB_FIELDS else job.layout, name)
        for name, parameter in _parameters_by_field().items()
    }
    if interval := find_interval(job):
        values["checkpointing_freq"] = interval
    return ["workload=parallel", *_overrides(values)]


def _build_torchtitan(job: Job) -> list[str]:
    TITAN.check(job)
    if _name_of(job.model) != "llama3_8b":
        raise UserInputError("workload=torchtitan: model cannot be written. Supported: llama3_8b")
    values: dict[str, Any] = {"assets": "ASSETS", "dataset_path": "TEXTS", "sequence_length": job.sequence_length}
    values |= {name: getattr(job.layout, name) for name in TITAN_NAMES}
    values["weights"] = TITAN_WEIGHTS[job.state]
    return ["workload=torchtitan", *_overrides(values | {"compile": job.compiled, "precision": job.precision})]


@cache
def own_support() -> Support:
    """Return what `workload=parallel` can express: the values of its parameters, and defaults of all other fields."""
    hints = get_type_hints(registry.load("parallel").Parameters)
    parameters = _parameters_by_field()
    values: dict[str, tuple[object, ...]] = {"sharding": ("none", "fsdp2")}
    for name, default in _defaults().items():
        parameter = parameters.get(name)
        if parameter is None:
            values.setdefault(name, (FIXED.get(name, default),))
        elif get_origin(hint := hints[parameter]) is not None:  # a Literal
            values[name] = get_args(hint)
    del values["checkpointed_layers"]
    return Support("own", values, (_check_sharding, _check_checkpointed_layers))


@cache
def _parameters_by_field() -> dict[str, str]:
    """Return the parameters of `workload=parallel` that a job or its layout has a field for, by that field."""
    known = {field.name for field in fields(registry.load("parallel").Parameters)}
    names = [*_defaults(), "sequence_length"]
    return {name: parameter for name in names if (parameter := RENAMED.get(name, name)) in known}


def _defaults() -> dict[str, object]:
    """Return the defaults of the fields of a layout, and of a job that says how it is trained."""
    of_job = {field.name: field.default for field in fields(Job) if field.name in JOB_FIELDS}
    of_layout = {field.name: field.default for field in fields(TrainingLayout)}
    return {name: default for name, default in (of_job | of_layout).items() if default is not MISSING}


def _name_of(model: Model) -> str:
    """Return the catalogue's name of a model.

    Raises:
        UserInputError: the catalogue does not have it.
    """
    if name := find_trained_name(model):
        return name
    raise UserInputError(
        "own: model is none of this project's catalogue (conf/model), which `workload=parallel` trains"
    )


def _overrides(values: dict[str, Any]) -> list[str]:
    return [
        f"space.{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in values.items()
    ]


def recognises(text: str) -> bool:
    """Return whether a text is a command of this project."""
    return "-m sweeper " in text and "workload=" in text


def read(text: str, gpus: int | None = None) -> FileReading:
    """Return what a command says, with the defaults of the workload's parameters for what it leaves out.

    Raises:
        UserInputError: it has another workload, an unknown model, or a key that is not fixed to one value.
    """
    words = shlex.split(text.replace("\\\n", " "), comments=True)
    values = {match[1]: match[2] for word in words if (match := _OVERRIDE.match(word))}
    workload = values.get("workload")
    if workload not in ("parallel", "torchtitan"):
        raise UserInputError(f"workload={workload}: only parallel and torchtitan have a layout")
    if open_key := next((name for name, value in values.items() if "," in value), None):
        raise UserInputError(f"space.{open_key}={values[open_key]}: a layout needs one value")
    if workload == "torchtitan":
        values = _torchtitan_values(values, gpus)
    model = TRAINED_MODELS.get(values.get("model", "llama3_8b"))
    if model is None:
        raise UserInputError(f"space.model={values['model']}: unknown model")
    read_fields = _read_fields(values)
    job_fields = {name: read_fields.pop(name) for name in JOB_FIELDS if name in read_fields}
    if (interval := int(values.get("checkpointing_freq", 1))) > 1:
        read_fields["checkpointed_layers"] = model.layers // interval
    trainer = "own" if workload == "parallel" else "torchtitan"
    layout = canonical_layout(TrainingLayout(**read_fields), model.layers)
    return FileReading(trainer, layout, model=model, **(FIXED | job_fields))


def _read_fields(values: dict[str, str]) -> dict[str, Any]:
    """Return the fields of a job and its layout that a command's values give."""
    defaults = {field.name: field.default for field in fields(registry.load("parallel").Parameters)}
    texts = {name: values.get(parameter) for name, parameter in _parameters_by_field().items()}
    parameters = _parameters_by_field()
    return {
        name: defaults[parameters[name]] if text is None else _parse(text, defaults[parameters[name]])
        for name, text in texts.items()
    }


def _parse(text: str, default: object) -> object:
    if isinstance(default, bool):
        return text.lower() == "true"
    return int(text) if text.isdigit() else text


def _torchtitan_values(values: dict[str, str], gpus: int | None) -> dict[str, str]:
    """Return the values of a command for torchtitan by the names of `workload=parallel`."""
    degrees = [int(values.get(name, 1)) for name in ("tp", "cp", "pp")]
    all_gpus = int(values["gpus"]) if values.get("gpus", "").isdigit() else gpus or 1
    dp_shard = all_gpus // (degrees[0] * degrees[1] * degrees[2])
    weights = values.get("weights", "float32")
    state = next((ours for ours, theirs in TITAN_WEIGHTS.items() if theirs == weights), weights)
    reshard = dp_shard * degrees[1] == 1 or degrees[2] == 1  # torchtitan's fsdp_reshard_after_forward=default
    return values | {
        "dp_shard": str(dp_shard),
        "dtype": values.get("precision", "bf16"),
        "state": state,
        "reshard_after_forward": str(reshard).lower(),
    }
