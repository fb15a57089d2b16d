"""What a request makes the planner search: the job, the cluster, and the fields of the layout that have one value."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from sweeper.commands.plan.request import PlanRequest
from sweeper.preflight import corrections
from sweeper.preflight.calibration import CalibrationFile, find_calibration
from sweeper.preflight.clusters import build_cluster
from sweeper.preflight.corrections import Correction, Place
from workloads.api.errors import UserInputError, describe_os_error
from workloads.api.registry import load
from workloads.estimator.cluster import Cluster
from workloads.estimator.words import layout_words
from workloads.formats.files import read_layout
from workloads.formats.names import FileReading
from workloads.layouts.enumeration import divisors
from workloads.layouts.job import (
    Job,
    TrainingLayout,
)
from workloads.layouts.offers import find_unsupported, fixed_by
from workloads.layouts.own_rules import SPLIT_SCHEDULES
from workloads.layouts.rules import DEGREES
from workloads.models.hugging_face import UnsupportedModel, load_model

OWN = "own"
OWN_WORKLOAD = "parallel"  # whose sweeps measure this project's trainer
COMMAND_WORKLOAD = "command"  # and other trainers, by their names
TOKENS_PER_STEP = 4_194_304  # of a global batch where none is given: that of Llama 3's first stage
SEARCHED_FIELDS = tuple(layout_words(TrainingLayout()))
LAYOUT_FIELDS = frozenset(item.name for item in fields(TrainingLayout)) - {"global_batch"}


@dataclass(frozen=True)
class Problem:
    """What is searched.

    Attributes:
        job: of its layout the batch counts alone.
        fixed: fields of the layout that have one value, by the request or since the trainer has no other.
        given: those by the request.
        batch: the global batch of the request; None where it follows from the number of GPUs.
        calibration: the measured rates that the cluster's device has; None for the tables' rates.
        correction: what sweeps on such a cluster have measured of the trainer; None for nothing.
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
        # These follow from the number of GPUs, and no sharding from nothing that could be sharded.
        free = {"dp_replicate", "dp_shard"} if request.tokens_per_day else set()
        free |= {"sharding"} if reading.layout.dp_shard * reading.layout.cp == 1 else set()
        given = {name: getattr(reading.layout, name) for name in SEARCHED_FIELDS if name not in free} | given
    if request.layers_per_stage is not None:
        given["layers_per_stage"] = _read_stages(request.layers_per_stage)
    trainer = request.trainer or (reading.trainer if reading else OWN)
    if reason := find_unsupported(trainer, given):
        raise UserInputError(reason)
    _check_degrees(given, None if request.tokens_per_day else gpus)
    batch = request.global_batch or (reading.layout.global_batch if reading else None)
    job = Job(
        model=model,
        layout=TrainingLayout(global_batch=batch or default_batch(request.sequence_length, gpus)),
        sequence_length=request.sequence_length,
        trainer=trainer,
        precision=request.precision,
        state=request.state,
        compiled=trainer != OWN or given.get("schedule") not in SPLIT_SCHEDULES,
    )
    correction = _find_correction(trainer, cluster, calibration)
    return Problem(
        job, cluster, {**fixed_by(trainer, given.get("sharding")), **given}, given, batch, calibration, correction
    )


def _check_degrees(given: Mapping[str, Any], gpus: int | None) -> None:
    """Check that the degrees that are given divide the number of GPUs; None where it is searched.

    Raises:
        UserInputError: they do not.
    """
    degrees = {name: given[name] for name in DEGREES if given.get(name, 1) > 1}
    product = math.prod(degrees.values())
    if gpus is None or gpus % product == 0:
        return
    product_words = f" = {product}" if len(degrees) > 1 else ""
    raise UserInputError(
        f"{' x '.join(f'{name}={value}' for name, value in degrees.items())}{product_words} does not divide "
        f"gpus={gpus}. Divisors: {', '.join(map(str, divisors(gpus)))}"
    )


def _find_correction(trainer: str, cluster: Cluster, calibration: CalibrationFile | None) -> Correction | None:
    """Return what sweeps have measured on such a cluster, in the file that is here if one is."""
    workload, measured = (OWN_WORKLOAD, OWN_WORKLOAD) if trainer == OWN else (COMMAND_WORKLOAD, trainer)
    per_node = min(cluster.gpus, cluster.topology.gpus_per_domain)
    version, calibrated = load(workload).benchmark_version, calibration.rates.date if calibration else ""
    topology = cluster.topology.name
    place = Place(cluster.device.name, measured, cluster.gpus, per_node, topology, version, calibrated)
    return corrections.find(corrections.read(Path()), place)


def _read_layout(request: PlanRequest) -> FileReading | None:
    """Return what the file that the request names says of a layout."""
    if request.layout is None:
        return None
    try:
        return read_layout(Path(request.layout).read_text(), request.gpus)
    except OSError as error:
        raise UserInputError(f"layout={request.layout}: {describe_os_error(error)}") from error
    except UnicodeDecodeError as error:
        raise UserInputError(f"layout={request.layout}: not a text file ({error.reason})") from error
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
