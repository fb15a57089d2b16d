"""Parse the arguments of `plan`, and build the planning problem that the arguments describe."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from sweeper.cli import command
from sweeper.config.catalogue import catalogue, list_figures, use_config_dir
from sweeper.preflight import corrections
from sweeper.preflight.calibration import AUTO, CalibrationFile, find_calibration
from sweeper.preflight.clusters import build_cluster
from sweeper.preflight.corrections import Correction, Place
from workloads.api.errors import UserInputError, describe_os_error
from workloads.api.registry import load
from workloads.estimator.questions import FAILURES_PER_GPU_DAY, Reliability
from workloads.formats.files import FORMATS, read_layout
from workloads.formats.names import FileReading, IndivisibleGpus
from workloads.formats.torchtitan import FLAVORS
from workloads.hardware.cluster import Cluster
from workloads.hardware.precisions import PRECISIONS
from workloads.layouts.enumeration import divisors
from workloads.layouts.layout import (
    DEGREES,
    LAYOUT_FIELDS,
    SPLIT_SCHEDULES,
    Checkpointing,
    ContextMethod,
    Dispatcher,
    Job,
    Layout,
    Schedule,
    Sharding,
    State,
    TensorOverlap,
    layout_words,
    write_words,
)
from workloads.layouts.trainers import OWN, TRAINERS, find_trainer
from workloads.models.hugging_face import UnsupportedModel, load_model
from workloads.models.model import MODELS, Model
from workloads.models.trained import load_trained_model
from workloads.suggestions import hint

MAX_GPUS = 2**20  # more than in any cluster; listing the degrees of larger numbers takes long
OF_EXPERTS = ("dispatcher", "expert_overlap", "expert_imbalance")
FALLBACK_TRAINER = "megatron"  # the default for models that `workload=parallel` does not train
OWN_WORKLOAD = "parallel"  # the workload with which sweeps measure this project's trainer
COMMAND_WORKLOAD = "command"  # the workload with which sweeps measure other trainers by name
TOKENS_PER_STEP = 4_194_304  # in the default global batch, as in Llama 3's first stage
FOLLOWED = ("tp", "cp", "pp")  # the degrees by which trainers divide the GPUs, for the data parallel degree
SEQUENCE_LENGTH = 8192
VOCABULARY_PADDING = 128 * 64  # tokens at most: Megatron-LM pads to a multiple of up to 128 times tp
SEARCHED_FIELDS = frozenset(layout_words(Layout()))
GIVEN_FIELDS = frozenset(LAYOUT_FIELDS) - {"global_batch"}


def degree(limit: int = MAX_GPUS) -> Any:
    return field(default=None, metadata={"min": 1, "max": limit})


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """The training run to plan. Layout fields that are given stay fixed, and the search varies the others.

    Attributes:
        model: name of a model, or the path of a Hugging Face config.json; by default from the file `layout`.
        hardware: name of a GPU in conf/hardware or config_dir, or several names, separated by commas, to compare.
        config_dir: a folder with your own GPUs in config_dir/hardware/NAME.yaml, like --config-dir of a sweep.
        gpus: number of GPUs, by default from the file `layout`; with `tokens_per_day` or `days`, the smallest to try.
        topology: name of a topology, or the path of a YAML file; by default nodes of 8 GPUs with the GPU's own links.
        network_gb_s: bandwidth from one GPU to other nodes, in each direction; by default from the topology.
        calibration: rates from `sweeper calibrate`: a file, a folder, or none; by default ./calibration if it exists.
        trainer: trainer whose rules, memory and efficiency apply; by default from `layout`, else `file`, else own, or
            megatron for a model that workload=parallel does not train.
        sequence_length: tokens per sequence; by default from the file `layout`, else 8192.
        global_batch: sequences per step; by default 4M tokens, rounded up to a multiple of the number of GPUs.
        precision: dtype or recipe of the GEMMs; by default from the file `layout`, else bf16.
        state: dtypes of weights, moments and gradients; by default from the file `layout`, else fp32.
        dispatcher: how tokens are sent to experts; by default from the file `layout`, else as the trainer does.
        expert_overlap: whether sending tokens to experts overlaps with the computation of another micro-batch.
        expert_imbalance: plan natural routing, with this many tokens of the busiest GPU's experts, divided by the mean;
            trials of workload=parallel record it as rank_imbalance. By default, forced balance.
        dp_replicate, dp_shard, tp, cp, pp, ep: parallel degrees.
        stages_per_rank: number of pipeline stages per GPU.
        schedule: execution order of the pipeline stages.
        first_stage_less_layers, last_stage_less_layers: how many layers fewer than the other stages the first or the
            last stage has; negative for more.
        micro_batch: number of sequences that a GPU processes at once.
        sharding: states that dp_shard divides among GPUs.
        reshard_after_forward: gather weights again for the backward pass.
        tp_overlap: computation that overlaps with tensor parallel collectives.
        cp_method: exchange of keys and values between context parallel GPUs.
        checkpointing: activations that the backward pass recomputes.
        layout: a trainer's file or log; all values in the file count as given, except those set by keys.
        file: trainer for which to write the fastest layout as a file.
        train_tokens: number of tokens of the whole training run, for the run's duration and cost.
        tokens_per_day: find the number of GPUs needed to train on this many tokens per day.
        days: find the number of GPUs needed to train on train_tokens in this many days, including failures; the middle
            of the band has to reach it. Up to twice as many are planned if they take 5% fewer GPU-hours.
        price_per_hour: price of one GPU-hour; by default a provider's list price in USD from conf/hardware, if known.
        max_cost: reject a plan if training on train_tokens costs more than this by the middle of the band. Without
            gpus, days and tokens_per_day, find the number of GPUs that trains fastest for at most this cost.
        failures_per_gpu_day: rate of unexpected interruptions; by default the rate in Llama 3's training.
        restart_s: time from a failure until training continues.
        checkpoint_s: time for which a checkpoint stops training.
    """

    model: str = ""
    hardware: str
    gpus: int | None = degree()
    topology: str | None = None
    network_gb_s: float | None = field(default=None, metadata={"min": 0.1})
    calibration: str = AUTO
    trainer: str | None = None
    sequence_length: int | None = degree(2**31)
    global_batch: int | None = degree(2**30)
    precision: str | None = None
    state: State | None = None
    dispatcher: Dispatcher | None = None
    expert_overlap: bool | None = None
    expert_imbalance: float | None = field(default=None, metadata={"min": 1})
    dp_replicate: int | None = degree()
    dp_shard: int | None = degree()
    tp: int | None = degree()
    cp: int | None = degree()
    pp: int | None = degree()
    ep: int | None = degree()
    stages_per_rank: int | None = degree()
    schedule: Schedule | None = None
    first_stage_less_layers: int | None = None
    last_stage_less_layers: int | None = None
    micro_batch: int | None = degree()
    sharding: Sharding | None = None
    reshard_after_forward: bool | None = None
    tp_overlap: TensorOverlap | None = None
    cp_method: ContextMethod | None = None
    checkpointing: Checkpointing | None = None
    layout: str | None = None
    file: str | None = None
    train_tokens: float = field(default=1e12, metadata={"min": 1e6})
    tokens_per_day: float | None = field(default=None, metadata={"min": 1})
    days: float | None = field(default=None, metadata={"min": 0.001})
    price_per_hour: float | None = field(default=None, metadata={"min": 0})
    max_cost: float | None = field(default=None, metadata={"min": 0})
    failures_per_gpu_day: float = field(default=FAILURES_PER_GPU_DAY, metadata={"min": 0})
    restart_s: float = field(default=Reliability.restart_s, metadata={"min": 0})
    checkpoint_s: float = field(default=Reliability.checkpoint_s, metadata={"min": 0})
    config_dir: str | None = None

    def __post_init__(self) -> None:
        if self.days is not None and self.tokens_per_day is not None:
            raise UserInputError(f"days={self.days:g}: takes the place of tokens_per_day=")
        if not self.model and self.layout is None:
            raise UserInputError("model: required. Give the name of a model, or the path of a config.json")
        if self.gpus is None and not self.finds_gpus and self.layout is None:
            raise UserInputError("gpus: required. Give the number, or tokens_per_day=, days= or max_cost= to find it")
        use_config_dir(self.config_dir)
        choices: list[tuple[str, str | None, Any]] = [
            ("trainer", self.trainer, TRAINERS),
            ("precision", self.precision, PRECISIONS),
            ("file", self.file, FORMATS),
            *(("hardware", name, catalogue()) for name in self.hardware.split(",")),
        ]
        for key, value, allowed in choices:
            if value is not None and value not in allowed:
                close = hint(value, allowed, f"{key}=")
                raise UserInputError(f"{key}={value}: must be one of {', '.join(allowed)}.{close}")

    def complete(self) -> Self:
        """Return the request with the model and the number of GPUs of the file `layout`, unless it has its own.
        Raises UserInputError if the file has no model that is known here."""
        if self.layout is None or (self.model and self.gpus):
            return self
        reading = _read_file(self, None)
        (_, named), found = reading.taken.get("model", ("", "")), _find_models(reading)
        model = self.model or (named if reading.trainer == OWN and named else found[0] if len(found) == 1 else "")
        if not model:
            said = " ".join(str(value) for name, value in reading.taken.values() if name == "model")
            said = write_words(reading.sizes) or said or "no sizes"
            raise UserInputError(f"model: required, because layout={self.layout} names none that is known ({said})")
        return replace(self, model=model, gpus=self.gpus or reading.gpus or reading.layout.gpus)

    @property
    def daily_tokens(self) -> float | None:
        """The tokens per day for which to find the number of GPUs; None if the request gives the number of GPUs."""
        return self.tokens_per_day if self.days is None else self.train_tokens / self.days

    @property
    def finds_gpus(self) -> bool:
        """Whether the plan finds the number of GPUs: for a rate, or for a cost without a number."""
        return self.daily_tokens is not None or (self.gpus is None and self.max_cost is not None)

    @property
    def price(self) -> tuple[float | None, str]:
        """The price of a GPU-hour and a description, from the request or the hardware catalog; None if unknown."""
        if self.price_per_hour is not None:
            return self.price_per_hour, f"{self.price_per_hour:g} per GPU-hour"
        entry = catalogue()[self.hardware]
        sources = [source for kind, _, source in list_figures(entry) if kind == "price"]
        words = [f"{entry.price_per_hour:g} USD per GPU-hour, assumed: {source}" for source in sources]
        return entry.price_per_hour, "".join(words)

    @property
    def reliability(self) -> Reliability:
        return Reliability(self.failures_per_gpu_day, self.restart_s, self.checkpoint_s)


def read_request(arguments: Sequence[str]) -> PlanRequest:
    return command.read_request(PlanRequest, arguments).complete()


@dataclass(frozen=True)
class Problem:
    """The problem that a plan solves: a job, a cluster, and the fixed layout fields."""

    job: Job  # only the global batch of the job's layout is used
    cluster: Cluster
    fixed: Mapping[str, Any]  # layout fields fixed by the request or by the trainer
    given: Mapping[str, Any]  # layout fields fixed by the request
    batch: int | None  # the requested global batch; None if the batch depends on the number of GPUs
    calibration: CalibrationFile | None  # measured rates of the device; None to use the rates in tables
    correction: Correction | None  # from earlier sweeps with the trainer on a similar cluster
    reading: FileReading | None = None  # the content of the file `layout`

    def on(self, gpus: int) -> Problem:
        """Return the problem for a different number of GPUs, dropping the correction from measurements."""
        batch = self.batch or default_batch(self.job.sequence_length, gpus)
        job = replace(self.job, layout=replace(self.job.layout, global_batch=batch))
        return replace(self, job=job, cluster=replace(self.cluster, gpus=gpus), correction=None)


def build_problem(request: PlanRequest) -> Problem:
    """Return the problem to search. Raises UserInputError if the planner or the trainer does not support a value."""
    try:
        model = load_model(request.model)
    except UnsupportedModel as error:
        raise UserInputError(f"model={request.model}: {error}") from error
    gpus = request.gpus or 1
    calibration = find_calibration(request.calibration, Path(), request.hardware)
    cluster = build_cluster(request.hardware, request.topology, gpus, calibration)
    if request.network_gb_s is not None:
        cluster = replace(cluster, topology=replace(cluster.topology, network_gb_s=request.network_gb_s))
    reading = _read_layout(request, model) if request.layout is not None else None
    given = {name: value for name in GIVEN_FIELDS if (value := getattr(request, name, None)) is not None}
    if reading:
        # The number of GPUs determines the data parallel degrees. Sharding is meaningless on a single rank.
        free = {"dp_replicate", "dp_shard"} if request.finds_gpus else set()
        free |= {"sharding"} if reading.layout.dp_shard * reading.layout.cp == 1 else set()
        read = {name: getattr(reading.layout, name) for name in GIVEN_FIELDS - free}
        # Fields outside the search keep their defaults unless the file changes them.
        kept = [name for name in read if name in SEARCHED_FIELDS or read[name] != getattr(Layout(), name)]
        given = {name: read[name] for name in kept} | given
    trainer = request.trainer or (reading.trainer if reading else request.file or "")
    if trainer in ("", OWN):
        try:
            model, trainer = load_trained_model(request.model), OWN
        except UnsupportedModel as error:
            if trainer:
                reason = str(error).rstrip(".")
                key = "trainer" if request.trainer else "file" if request.file else "layout"
                asked = write_words({key: getattr(request, key)})
                raise UserInputError(f"{asked}: {reason}. trainer={FALLBACK_TRAINER} can plan this model") from error
            trainer = FALLBACK_TRAINER
    for name in OF_EXPERTS if not model.experts else ():
        if (value := getattr(request, name)) is not None:
            raise UserInputError(f"{write_words({name: value})}: {request.model} has no experts")
    job = _build_job(request, model, trainer, reading)
    of_job = {name: getattr(job, name) for name in ("precision", "state", *OF_EXPERTS)}
    if reason := find_trainer(trainer).find_unsupported(given | of_job):
        raise UserInputError(reason)
    batch = request.global_batch or (reading.layout.global_batch if reading else None)
    job = replace(job, layout=Layout(global_batch=batch or default_batch(job.sequence_length, gpus)))
    if trainer == OWN and given.get("schedule") in SPLIT_SCHEDULES:
        job = replace(job, compiled=False)
    fixed = {**find_trainer(trainer).fixed_degrees(given.get("sharding")), **given}
    if not request.finds_gpus:
        _check_degrees(fixed, gpus, f"layout={request.layout}: " if reading else "")
    correction = _find_correction(trainer, cluster, calibration)
    return Problem(job, cluster, fixed, given, batch, calibration, correction, reading)


def _build_job(request: PlanRequest, model: Model, trainer: str, reading: FileReading | None) -> Job:
    of_file = reading or FileReading(trainer, Layout(), SEQUENCE_LENGTH, compiled=find_trainer(trainer).compiles)
    others: dict[str, Any] = {"dispatcher": "allgather"} if trainer == OWN else {}  # as in `workloads.parallel`
    cores = {find_trainer(name).core for name in (trainer, of_file.trainer)}
    if trainer == of_file.trainer or cores == {"megatron"}:  # others exchange tokens in their own way
        others |= of_file.others
    others |= {name: value for name in OF_EXPERTS if (value := getattr(request, name)) is not None}
    others |= {"expert_loads": "natural"} if request.expert_imbalance is not None else {}
    return Job(
        model=model,
        layout=Layout(),
        sequence_length=request.sequence_length or of_file.sequence_length or SEQUENCE_LENGTH,
        trainer=trainer,
        precision=request.precision or of_file.precision,
        state=request.state or of_file.state,  # type: ignore[arg-type]
        compiled=of_file.compiled,
        document_tokens=of_file.document_tokens,
        **others,
    )


def _read_file(request: PlanRequest, model: Model | None) -> FileReading:
    """Return the content of the file `layout`. Raises UserInputError if it cannot be read."""
    path = str(request.layout)
    try:
        return _read_on_gpus(Path(path).read_text(), request, model)
    except OSError as error:
        raise UserInputError(f"layout={path}: {describe_os_error(error)}") from error
    except UnicodeDecodeError as error:
        raise UserInputError(f"layout={path}: not a text file ({error.reason})") from error
    except UserInputError as error:
        raise UserInputError(f"layout={path}: {error}") from error


def _read_layout(request: PlanRequest, model: Model) -> FileReading:
    """Return the content of the file `layout`. Raises UserInputError if it cannot be read or is for another model."""
    reading = _read_file(request, model)
    differing = {name: size for name, size in reading.sizes.items() if not _is_same(name, size, model)}
    if not differing:
        return reading
    # A torchtitan file selects a flavor and so cannot name a model without a flavor. Logs and Primus files can.
    if FORMATS["torchtitan"].recognizes(Path(str(request.layout)).read_text()) and model not in FLAVORS.values():
        note = f"model.flavor: torchtitan has none of model={request.model}, whose sizes are taken"
        taken = {key: value for key, value in reading.taken.items() if value[0] != "model"}
        return replace(reading, notes=(*reading.notes, note), taken=taken)
    theirs = ", ".join(f"{n} {_count(size)}, not {_count(getattr(model, n))}" for n, size in differing.items())
    meant = f" Did you mean model={same[0]}?" if (same := _find_models(reading)) else ""
    raise UserInputError(f"model={request.model}: layout={request.layout} is of another model: {theirs}.{meant}")


def _find_models(reading: FileReading) -> list[str]:
    return [name for name, model in MODELS.items() if all(_is_same(*size, model) for size in reading.sizes.items())]


def _read_on_gpus(text: str, request: PlanRequest, model: Model | None) -> FileReading:
    """Return the content of a file. If the request changes degrees of the file, the data parallel degrees follow, as in
    the trainers: they divide the GPUs by the other degrees, unless the file sets `dp_shard` itself."""
    given = {name: value for name in FOLLOWED if (value := getattr(request, name)) is not None}
    try:
        reading = read_layout(text, request.gpus, model)
    except IndivisibleGpus as error:
        if not given:
            raise
        reading = read_layout(text, error.product, model)
        reading = replace(reading, notes=tuple(note for note in reading.notes if "gpus=" not in note))
    of_file = {name: getattr(reading.layout, name) for name in FOLLOWED}
    dp, rest = divmod(request.gpus or 0, math.prod((of_file | given).values()))
    sets_shards = any(name == "dp_shard" and value != -1 for name, value in reading.taken.values())  # -1: the rest
    if rest or dp in (0, reading.layout.dp) or reading.trainer == OWN or sets_shards:
        return reading
    return replace(read_layout(text, dp * math.prod(of_file.values()), model), notes=reading.notes)


def _is_same(name: str, size: Any, model: Model) -> bool:
    """Return whether a size of a file is that of a model. Vocabularies differ by padding and by reserved tokens."""
    ours = getattr(model, name)
    return size == ours or (name == "vocabulary" and abs(size - ours) <= VOCABULARY_PADDING)


def _count(size: Any) -> Any:
    return len(size) if isinstance(size, tuple) else str(size).lower() if isinstance(size, bool) else size


def _check_degrees(fixed: Mapping[str, Any], gpus: int, origin: str) -> None:
    """Raise UserInputError, which starts with `origin`, if the fixed degrees contradict the number of GPUs."""
    degrees = {name: fixed[name] for name in DEGREES if fixed.get(name, 1) > 1}
    product, is_complete = math.prod(degrees.values()), fixed.keys() >= {*DEGREES}
    if product == gpus or (gpus % product == 0 and not is_complete):
        return
    written = " x ".join(f"{name}={value}" for name, value in degrees.items()) or "all degrees are 1"
    written += f" = {product}" if len(degrees) > 1 else ""
    if not is_complete:
        raise UserInputError(f"{written} does not divide gpus={gpus}. Divisors: {', '.join(map(str, divisors(gpus)))}")
    name = "dp_shard" if fixed["dp_shard"] > 1 else "dp_replicate"
    changed, rest = divmod(gpus * fixed[name], product)
    remedy = "" if rest else f" or {name}={changed}"
    raise UserInputError(f"{origin}{written}, but gpus={gpus}. Set gpus={product}{remedy}")


def _find_correction(trainer: str, cluster: Cluster, calibration: CalibrationFile | None) -> Correction | None:
    workload, measured = (OWN_WORKLOAD, OWN_WORKLOAD) if trainer == OWN else (COMMAND_WORKLOAD, trainer)
    per_node = min(cluster.gpus, cluster.topology.gpus_per_domain)
    version, calibrated = load(workload).benchmark_version, calibration.rates.date if calibration else ""
    topology = cluster.topology.name
    place = Place(cluster.device.name, measured, cluster.gpus, per_node, topology, version, calibrated)
    return corrections.find(corrections.read(Path()), place)


def default_batch(sequence_length: int, gpus: int) -> int:
    """Return the number of sequences in 4M tokens, rounded up to a multiple of the number of GPUs."""
    sequences = max(1, TOKENS_PER_STEP // sequence_length)
    return -(-sequences // gpus) * gpus
