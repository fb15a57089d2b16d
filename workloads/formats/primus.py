"""Primus's experiment file: its Megatron trainer with all sizes and degrees as overrides of its modules."""

from __future__ import annotations

import re
from typing import Any

import yaml

from workloads.api.errors import UserInputError
from workloads.formats.megatron import RUN
from workloads.formats.megatron_reading import read_settings
from workloads.formats.megatron_rules import support
from workloads.formats.megatron_settings import Settings, build_settings
from workloads.formats.rendering import FileReading, RenderedFile, nodes_of
from workloads.layouts.job import Job
from workloads.models.model import Model

NAME = "primus.yaml"
# Primus's models whose sizes a file may leave to it: primus/configs/models/megatron.
MODELS = {
    "llama3_8B": Model(32, 4096, 32, 8, 128, 14336, 128256),
    "llama3.1_8B": Model(32, 4096, 32, 8, 128, 14336, 128256),
    "llama3_70B": Model(80, 8192, 64, 8, 128, 28672, 128256),
    "llama3.1_70B": Model(80, 8192, 64, 8, 128, 28672, 128256),
    "llama3.1_405B": Model(126, 16384, 128, 8, 128, 53248, 128256),
}
# What Primus's own files set differently from Megatron-LM: primus/configs, language_model.yaml and pre_trainer.yaml.
DEFAULTS: Settings = {
    "use_distributed_optimizer": True,
    "bf16": True,
    "sequence_parallel": True,
    "swiglu": True,
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
    "seq_length": 1024,
    "micro_batch_size": 2,
    "global_batch_size": 16,
}
SWITCHED_OFF = {name: False for name, value in DEFAULTS.items() if value is True}
_LAUNCH = re.compile(r"\b(NNODES|GPUS_PER_NODE)=(\d+)")


def _check_zero_bubble(job: Job) -> str:
    stages = {"zero_bubble": 1, "zbv": 2}.get(job.layout.schedule)
    if stages in (None, job.layout.stages_per_rank):
        return ""
    return f"schedule={job.layout.schedule} needs stages_per_rank={stages}, not {job.layout.stages_per_rank}"


SUPPORT = support("primus", rules=(_check_zero_bubble,))


def render(job: Job, gpus: int) -> RenderedFile:
    """Return the experiment file of a canonical job.

    Raises:
        UserInputError: Primus cannot express it.
    """
    SUPPORT.check(job)
    nodes, per_node = nodes_of(gpus)
    rank = "" if nodes == 1 else "NODE_RANK=$NODE_RANK MASTER_ADDR=$MASTER_ADDR "
    launch = f"NNODES={nodes} {rank}GPUS_PER_NODE={per_node}"
    command = f"{launch} ./primus-cli direct -- train pretrain --config={NAME}"
    trainer = {
        "framework": "megatron",
        "config": "pre_trainer.yaml",
        "model": "language_model.yaml",
        "overrides": SWITCHED_OFF | build_settings(job) | _schedule(job) | RUN,
    }
    experiment = {"work_group": "sweeper", "user_name": "sweeper", "exp_name": "plan", "workspace": "./output"}
    text = yaml.safe_dump(experiment | {"modules": {"pre_trainer": trainer}}, sort_keys=False)
    return RenderedFile(NAME, f"# Primus: {command}\n{text}", command, ("run it in the folder of Primus",))


def _schedule(job: Job) -> Settings:
    """Return the settings of zero-bubble schedules, with which gradients are reduced behind the last backward pass."""
    if job.layout.schedule not in ("zero_bubble", "zbv"):
        return {}
    return {
        "patch_zero_bubble": True,
        "enable_zero_bubble": True,
        "zero_bubble_v_schedule": job.layout.schedule == "zbv",
        "overlap_grad_reduce": False,
        "overlap_param_gather": False,
    }


def read(text: str, gpus: int | None = None) -> FileReading:
    """Return what an experiment file says.

    Raises:
        UserInputError: it is not one with a Megatron trainer, or the number of GPUs is missing.
    """
    trainer = _find_trainer(_load(text))
    if trainer is None:
        raise UserInputError("not an experiment of Primus with modules.pre_trainer.framework: megatron")
    launch = {name: int(number) for name, number in _LAUNCH.findall(text)}
    gpus = launch["NNODES"] * launch["GPUS_PER_NODE"] if len(launch) == 2 else gpus
    overrides = {name: _resolve(value) for name, value in (trainer.get("overrides") or {}).items()}
    name = str(trainer.get("model", "")).removesuffix(".yaml")
    return read_settings(DEFAULTS | overrides, "primus", gpus, MODELS.get(name))


def recognises(text: str) -> bool:
    """Return whether a text is an experiment file of Primus."""
    return "pre_trainer" in text and _find_trainer(_load(text)) is not None


def _load(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return None


def _find_trainer(experiment: Any) -> dict[str, Any] | None:
    modules = experiment.get("modules") if isinstance(experiment, dict) else None
    trainer = modules.get("pre_trainer") if isinstance(modules, dict) else None
    return trainer if isinstance(trainer, dict) and trainer.get("framework", "megatron") == "megatron" else None


def _resolve(value: Any) -> Any:
    """Return a value of the file: for `${PRIMUS_NAME:8}` its default."""
    match = re.fullmatch(r"\$\{\w+:(.*)\}", value) if isinstance(value, str) else None
    return yaml.safe_load(match[1]) if match else value
