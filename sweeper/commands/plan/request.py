"""The words of the command: what is trained, on what, and which parts of the layout are given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import yaml

from sweeper.config.catalogue import catalogue
from sweeper.config.validation import build
from sweeper.preflight.calibration import AUTO
from workloads.api.errors import UserInputError, nearest, suggest
from workloads.estimator.precisions import PRECISIONS
from workloads.estimator.questions import FAILURES_PER_GPU_DAY, Reliability
from workloads.formats.files import FORMATS
from workloads.layouts.job import (
    Checkpointing,
    ContextMethod,
    Schedule,
    Sharding,
    State,
    TensorOverlap,
)
from workloads.layouts.offers import OFFERS

MAX_GPUS = 2**20  # more than any cluster has; degrees of a larger number take long to list
MAX_SEQUENCES = 2**30


def degree(limit: int = MAX_GPUS) -> Any:
    return field(default=None, metadata={"min": 1, "max": limit})


@dataclass(frozen=True)
class PlanRequest:
    """What to plan. Fields of the layout that are given have one value; the others are searched.

    Attributes:
        model: name of a model, or the path of a Hugging Face config.json.
        hardware: name of a GPU of conf/hardware.
        gpus: number of GPUs; with `tokens_per_day` the fewest that are tried.
        topology: name of a topology, or the path of a YAML file; by default nodes of 8 with the GPU's own links.
        network_gb_s: bandwidth of one GPU to other nodes, each way; by default the topology's.
        calibration: rates measured by sweeper calibrate: a file or its folder, none, or those in ./calibration if any.
        trainer: whose rules, memory and efficiency apply; by default the one of the file `layout`, else own.
        sequence_length: tokens of a sequence.
        global_batch: sequences in a step; by default 4 M tokens, rounded up to a multiple of the GPUs.
        precision: data type or recipe of the matrix products.
        state: data types of weights, moments and gradients.
        dp_replicate, dp_shard, tp, cp, pp, ep: parallel degrees.
        stages_per_rank, schedule: pipeline stages of a GPU, and their order.
        layers_per_stage: of each stage, separated by commas; by default evenly divided.
        micro_batch: sequences that a GPU computes at once.
        sharding: which states dp_shard divides.
        reshard_after_forward: gather weights again for the backward pass.
        tp_overlap: computation beside tensor parallel collectives.
        cp_method: exchange of keys and values between context parallel GPUs.
        checkpointing: what the backward pass computes again.
        layout: a trainer's file or log, whose layout and batch are given ones.
        file: the trainer for which the fastest layout is written as a file.
        train_tokens: tokens of a whole training, for its duration and cost.
        tokens_per_day: find the number of GPUs that trains on so many.
        price_per_hour: of one GPU.
        failures_per_gpu_day: unexpected interruptions; by default those of Llama 3's training.
        restart_s: from a failure until training goes on.
        checkpoint_s: a checkpoint stops training for so long.
    """

    model: str
    hardware: str
    gpus: int | None = degree()
    topology: str | None = None
    network_gb_s: float | None = field(default=None, metadata={"min": 0.1})
    calibration: str = AUTO
    trainer: str | None = None
    sequence_length: int = field(default=8192, metadata={"min": 1})
    global_batch: int | None = degree(MAX_SEQUENCES)
    precision: str = "bf16"
    state: State = "fp32"
    dp_replicate: int | None = degree()
    dp_shard: int | None = degree()
    tp: int | None = degree()
    cp: int | None = degree()
    pp: int | None = degree()
    ep: int | None = degree()
    stages_per_rank: int | None = degree()
    schedule: Schedule | None = None
    layers_per_stage: str | None = None
    micro_batch: int | None = degree()
    sharding: Sharding | None = None
    reshard_after_forward: bool | None = None
    tp_overlap: TensorOverlap | None = None
    cp_method: ContextMethod | None = None
    checkpointing: Checkpointing | None = None
    layout: str | None = None
    file: str | None = None
    train_tokens: float | None = field(default=None, metadata={"min": 1})
    tokens_per_day: float | None = field(default=None, metadata={"min": 1})
    price_per_hour: float | None = field(default=None, metadata={"min": 0})
    failures_per_gpu_day: float = field(default=FAILURES_PER_GPU_DAY, metadata={"min": 0})
    restart_s: float = field(default=Reliability.restart_s, metadata={"min": 0})
    checkpoint_s: float = field(default=Reliability.checkpoint_s, metadata={"min": 0})

    @property
    def reliability(self) -> Reliability:
        return Reliability(self.failures_per_gpu_day, self.restart_s, self.checkpoint_s)


def read_request(words: Sequence[str]) -> PlanRequest:
    """Return the request that `key=value` words make.

    Raises:
        UserInputError: for a word that is no key with a value, or a value that is not allowed.
    """
    values: dict[str, Any] = {}
    for word in words:
        name, sign, text = word.partition("=")
        if not sign or not name:
            raise UserInputError(f"{word}: not of the form key=value. {suggest(word, _keys())}")
        if name in values:
            raise UserInputError(f"{name}: given twice, as {name}={values[name]} and {word}. Give it once")
        values[name] = _read_value(name, text)
    request = build(PlanRequest, values)
    if request.gpus is None and (request.tokens_per_day is None or request.layout is not None):
        raise UserInputError("gpus: required. Give the number of GPUs, or tokens_per_day= to find it")
    if request.trainer is not None:
        _check_name("trainer", request.trainer, OFFERS)
    _check_name("precision", request.precision, PRECISIONS)
    _check_name("hardware", request.hardware, catalogue())
    if request.file is not None:
        _check_name("file", request.file, FORMATS)
    return request


def _keys() -> list[str]:
    return [item.name for item in fields(PlanRequest)]


def _read_value(name: str, text: str) -> Any:
    """Return the value as YAML reads it; `15e12` too is a number."""
    try:
        return float(text) if text and text[0].isdigit() and "e" in text else yaml.safe_load(text)
    except ValueError:
        return text
    except yaml.YAMLError as error:
        raise UserInputError(f"{name}={text}: not a value") from error


def _check_name(key: str, value: str, allowed: Mapping[str, object]) -> None:
    if value not in allowed:
        close = nearest(value, allowed)
        hint = f" Did you mean {key}={close}?" if close else ""
        raise UserInputError(f"{key}={value}: must be one of {', '.join(allowed)}.{hint}")
