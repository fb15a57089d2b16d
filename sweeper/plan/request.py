"""The words of the command: what is trained, on what, and which parts of the layout are given."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import yaml

from sweeper.common.errors import UserInputError, describe_os_error, nearest, suggest
from sweeper.config.catalogue import catalogue
from sweeper.config.validation import build
from sweeper.planning import corrections
from sweeper.planning.calibration import AUTO, CalibrationFile, find_calibration
from sweeper.planning.clusters import build_cluster
from sweeper.planning.corrections import Correction, Place
from sweeper.planning.files.formats import FORMATS, read_layout
from sweeper.planning.files.rendering import FileReading
from workloads.api.registry import load
from workloads.planner.cluster import Cluster
from workloads.planner.job import (
    Checkpointing,
    ContextMethod,
    Job,
    Schedule,
    Sharding,
    State,
    TensorOverlap,
    TrainingLayout,
)
from workloads.planner.models import UnsupportedModel, load_model
from workloads.planner.offers import OFFERS, fixed_by
from workloads.planner.precisions import PRECISIONS
from workloads.planner.questions import FAILURES_PER_GPU_DAY, Reliability
from workloads.planner.words import layout_words

OWN_WORKLOAD = "parallel"  # whose sweeps measure this project's trainer
TOKENS_PER_STEP = 4_194_304  # of a global batch where none is given: that of Llama 3's first stage


def degree() -> Any:
    return field(default=None, metadata={"min": 1})


@dataclass(frozen=True)
class PlanRequest:
    """What to plan. Fields of the layout that are given have one value; the others are searched.

    Attributes:
        model: name of a model, or the path of a Hugging Face config.json.
        hardware: name of a GPU of conf/hardware.
        gpus: number of GPUs; with `tokens_per_day` the fewest that are tried.
        topology: name of a topology, or the path of a YAML file; by default nodes of 8 with the GPU's own links.
        network_gb_s: bandwidth of one GPU to other nodes, each way; by default the topology's.
        calibration: rates measured by sweeper.calibrate: a file or its folder, none, or those in ./calibration if any.
        trainer: whose rules, memory and efficiency apply.
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
    trainer: str = "own"
    sequence_length: int = field(default=8192, metadata={"min": 1})
    global_batch: int | None = degree()
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


SEARCHED_FIELDS = tuple(layout_words(TrainingLayout()))
LAYOUT_FIELDS = frozenset(item.name for item in fields(TrainingLayout)) - {"global_batch"}


def read_request(words: Sequence[str]) -> PlanRequest:
    """Return the request that `key=value` words make.

    Raises:
        UserInputError: for a word that is no key with a value, or a value that is not allowed.
    """
    values: dict[str, Any] = {}
    for word in words:
        name, sign, text = word.partition("=")
        if not sign:
            raise UserInputError(f"{word}: not of the form key=value. {suggest(word, _keys())}")
        values[name] = _read_value(name, text)
    request = build(PlanRequest, values)
    if request.gpus is None and (request.tokens_per_day is None or request.layout is not None):
        raise UserInputError("gpus: required. Give the number of GPUs, or tokens_per_day= to find it")
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


@dataclass(frozen=True)
class Problem:
    """What is searched.

    Attributes:
        job: of its layout the batch counts alone.
        fixed: fields of the layout that have one value, by the request or since the trainer has no other.
        given: those by the request.
        batch: the global batch of the request; None where it follows from the number of GPUs.
        calibration: the measured rates that the cluster's device has; None for the tables' rates.
        correction: what sweeps on such a cluster have measured of this project's trainer; None for nothing.
    """

    job: Job
    cluster: Cluster
    fixed: Mapping[str, Any]
    given: Mapping[str, Any]
    batch: int | None = None
    calibration: CalibrationFile | None = None
    correction: Correction | None = None

    def on(self, gpus: int) -> Problem:
        """Return the same problem on another number of GPUs, of which nothing was measured."""
        batch = self.batch or default_batch(self.job.sequence_length, gpus)
        job = replace(self.job, layout=replace(self.job.layout, global_batch=batch))
        return replace(self, job=job, cluster=replace(self.cluster, gpus=gpus), correction=None)


def build_problem(request: PlanRequest) -> Problem:
    """Return what is searched for a request.

    Raises:
        UserInputError: for a model or a topology that is not known, or a degree that the trainer does not have.
    """
    try:
        model = load_model(request.model)
    except UnsupportedModel as error:
        raise UserInputError(f"model={request.model}: {error}") from error
    gpus = request.gpus or 1
    calibration = find_calibration(request.calibration, Path(), request.hardware)
    cluster = build_cluster(request.hardware, request.topology, gpus, calibration)
    if request.network_gb_s is not None:
        cluster = replace(cluster, topology=replace(cluster.topology, network_gb_s=request.network_gb_s))
    reading = _read_layout(request)
    given = {name: value for name in LAYOUT_FIELDS if (value := getattr(request, name, None)) is not None}
    if reading:
        free = ("dp_replicate", "dp_shard") if request.tokens_per_day else ()  # they follow from the number of GPUs
        given = {name: getattr(reading.layout, name) for name in SEARCHED_FIELDS if name not in free} | given
    if request.layers_per_stage is not None:
        given["layers_per_stage"] = _read_stages(request.layers_per_stage)
    without = fixed_by(request.trainer)
    for name, value in without.items():
        if given.get(name, value) != value:
            raise UserInputError(f"{name}={given[name]}: {request.trainer} has no such degree; it has to be {value}")
    batch = request.global_batch or (reading.layout.global_batch if reading else None)
    job = Job(
        model=model,
        layout=TrainingLayout(global_batch=batch or default_batch(request.sequence_length, gpus)),
        sequence_length=request.sequence_length,
        trainer=request.trainer,
        precision=request.precision,
        state=request.state,
    )
    correction = _find_correction(request.trainer, cluster, calibration)
    return Problem(job, cluster, {**without, **given}, given, batch, calibration, correction)


def _find_correction(trainer: str, cluster: Cluster, calibration: CalibrationFile | None) -> Correction | None:
    """Return what sweeps have measured on such a cluster, in the file that is here if one is."""
    if trainer != "own":
        return None
    per_node = min(cluster.gpus, cluster.topology.gpus_per_domain)
    version, calibrated = load(OWN_WORKLOAD).benchmark_version, calibration.rates.date if calibration else ""
    topology = cluster.topology.name
    place = Place(cluster.device.name, OWN_WORKLOAD, cluster.gpus, per_node, topology, version, calibrated)
    return corrections.find(corrections.read(Path()), place)


def _read_layout(request: PlanRequest) -> FileReading | None:
    """Return what the file that the request names says of a layout."""
    if request.layout is None:
        return None
    try:
        return read_layout(Path(request.layout).read_text(), request.gpus)
    except OSError as error:
        raise UserInputError(f"layout={request.layout}: {describe_os_error(error)}") from error
    except UserInputError as error:
        raise UserInputError(f"layout={request.layout}: {error}") from error


def _read_stages(text: str) -> tuple[int, ...]:
    """Return the layers of each stage that `9,7,8,8` says."""
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", text):
        raise UserInputError(f"layers_per_stage={text}: must be the layers of each stage, such as 9,7,8,8")
    return tuple(map(int, text.split(",")))


def default_batch(sequence_length: int, gpus: int) -> int:
    """Return the sequences of 4 M tokens, rounded up to a multiple of the GPUs."""
    sequences = max(1, TOKENS_PER_STEP // sequence_length)
    return -(-sequences // gpus) * gpus
