"""The planner's estimate of a job: step time and memory, itemized by use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from workloads.api.contract import BandEnds
from workloads.hardware.cluster import Cluster
from workloads.layouts.layout import Job
from workloads.tables import read_csv


@dataclass(frozen=True)
class StepTime:
    """Step time in seconds on the slowest GPU's critical path, by use. Only exposed communication counts."""

    products: float  # GEMMs in blocks, forward, backward and recomputed
    attention: float  # GEMMs of scores and of outputs, forward, backward and recomputed
    head_and_loss: float  # the output layer and the loss
    other_compute: float  # norms, activations, casts and other operations limited by memory bandwidth
    bubble: float = 0.0  # time that a pipeline stage waits for other stages
    data_parallel: float = 0.0
    tensor_parallel: float = 0.0
    context_parallel: float = 0.0
    expert_parallel: float = 0.0
    pipeline: float = 0.0
    optimizer: float = 0.0  # the optimizer's step, on the GPU or the host
    copies: float = 0.0  # copies of gathered weights and gradients, and copies between host and GPU
    stalls: float = 0.0  # the allocator frees and reallocates memory, if a layout needs more than is usable

    @property
    def total_s(self) -> float:
        return float(sum(vars(self).values()))

    def scaled(self, factor: float) -> StepTime:
        return StepTime(**{name: factor * seconds for name, seconds in vars(self).items()})


@dataclass(frozen=True)
class StageMemory:
    """Peak memory in GiB on one GPU of a pipeline stage, by use."""

    parameters: float  # weights as stored between steps, including master weights
    gathered: float  # weights gathered for use, and copies in the GEMM data type
    gradients: float  # gradients as accumulated
    optimizer_states: float  # the optimizer's moments
    activations: float  # tensors saved for the backward pass
    working: float  # temporary tensors of the largest layer or of the loss
    runtime: float  # the device context, communication buffers and library workspaces
    reserved: float = 0.0  # memory that the allocator has reserved but not allocated

    @property
    def allocated_gib(self) -> float:
        """The peak of allocated memory that the framework reports, excluding `runtime` and `reserved`."""
        return self.total_gib - self.runtime - self.reserved

    @property
    def reserved_gib(self) -> float:
        """The peak of reserved memory that the framework reports."""
        return self.total_gib - self.runtime

    @property
    def needed_gib(self) -> float:
        """The memory use that the driver would report if the allocator released all unallocated memory."""
        return self.total_gib - self.reserved

    @property
    def total_gib(self) -> float:
        """The memory use that the driver reports."""
        return float(sum(vars(self).values()))


@dataclass(frozen=True)
class JobEstimate:
    step: StepTime  # step time by use
    stages: tuple[StageMemory, ...]  # the memory of each pipeline rank
    tokens: int  # number of tokens per step on all GPUs
    model_flops: float  # per step, by the causal convention (`workloads.models.flops`)
    peak_tflops: float | None  # one GPU's peak in the GEMM data type, for the MFU; None if no source has it
    gpus: int  # the number of GPUs
    not_modelled: tuple[str, ...] = ()  # sentences about properties of the job that the estimate ignores

    @property
    def memory(self) -> StageMemory:
        return max(self.stages, key=lambda stage: stage.total_gib)

    @property
    def tokens_per_s_per_gpu(self) -> float:
        return self.tokens / self.step.total_s / self.gpus

    @property
    def mfu(self) -> float | None:
        """The fraction of the peak that the model's FLOPs reach, between 0 and 1. None if the peak is unknown."""
        if self.peak_tflops is None:
            return None
        return self.model_flops / self.step.total_s / self.gpus / (self.peak_tflops * 1e12)


BANDS = Path(__file__).parent / "tables" / "bands.csv"
BY_NAME = ("factors", "pairs", "errors")  # columns with values by trainer, or by trainer and device
COVERED = 0.9  # the share of runs within the band, with equal weight for each source


@dataclass(frozen=True)
class Known:
    """The range of a family's measured runs: the longest sequence, the smallest model's parameters in millions, and the
    most GPUs of each `trainer@device`. With `of_trainers`, other trainers' runs do not count as runs on many GPUs."""

    tokens: int
    parameters: int
    pairs: Mapping[str, int]
    of_trainers: bool = False

    def missing(self, job: Job, cluster: Cluster) -> list[str]:
        """Return a sentence for each property of the job that no measured run has."""
        device, known = cluster.device.name, [pair.split("@") for pair in self.pairs]
        trainers = {trainer for trainer, _ in known if trainer.startswith(job.trainer)}  # megatron matches megatron-lm
        lacks = [f"on {device}"] if device not in {name for _, name in known} else []
        lacks += [] if trainers else [f"of trainer={job.trainer}"]
        if not lacks and not self.pairs.keys() & {f"{trainer}@{device}" for trainer in trainers}:
            lacks.append(f"of trainer={job.trainer} on {device}")
        # This run trained GLM-5.2 on 192 GB200s, with indexer loss and natural routing (planner_rows_2026.csv).
        selects = "with attention to selected whole tokens (the one published run took 8 times its estimate)"
        lacks += [selects] * bool(job.model.index_heads and not job.model.compression)
        counted = [gpus for pair, gpus in self.pairs.items() if pair.split("@")[0] in trainers or not self.of_trainers]
        most = max(counted or self.pairs.values(), default=0)
        lacks += [f"on more than {most:,} GPUs"] * (cluster.gpus > most)
        lacks += [f"of more than {self.tokens:,} tokens a sequence"] * (job.sequence_length > self.tokens)
        is_tiny = job.model.parameters < self.parameters * 1e6 / 2
        lacks += [f"of a model with fewer than {self.parameters:,} million parameters"] * is_tiny
        return [f"no measured run {lacking} is among those that the band rests on" for lacking in lacks]


LARGEST_SHARE = 0.9  # a band that is wider would reach a rate of zero


@dataclass(frozen=True)
class Band:
    """The error band around estimates for a family of jobs, at a given distance from the measured runs.

    The rates of 90% of the runs at this distance are within the band. For memory, 90% are below its upper end and 90%
    above its lower end. Each run's comparison leaves out the run's own source.
    """

    ends: BandEnds
    runs: int  # number of runs of this family, at any distance
    sources: int
    worse: int  # the number of these runs that were slower, or needed more memory, than estimated
    known: Known
    factors: Mapping[str, float]  # how wide the bands of trainers with measured runs are, relative to other trainers
    errors: Mapping[str, str]  # by `trainer@device`: the number of runs and their mean error

    @property
    def meaning(self) -> str:
        runs = f"{self.runs} measured runs of {self.sources} sources"
        slower = f"{self.worse} are slower than estimated"
        return f"{COVERED:.0%} of {runs}, each left out, are within their trainers' bands; {slower}"

    def describe_pair(self, trainer: str, device: str) -> str:
        """Describe the family's measured runs of a trainer on a device; empty if there are none."""
        if (pair := f"{trainer}@{device}") not in self.errors:
            return ""
        runs, error = self.errors[pair].split(":")
        counted = f"measured runs: {runs}, most GPUs: {self.known.pairs[pair]}"
        return f"; the mean error of {trainer} on {device} is {error}% ({counted})"


@cache
def bands() -> dict[str, tuple[Band, ...]]:
    """Return each family's bands, indexed by distance: the number of the job's properties that no measured run has."""
    families: dict[str, tuple[Band, ...]] = {}
    for row in read_csv(__file__, "tables/bands.csv"):
        factors, pairs, errors = (dict(each.split("=") for each in row[name].split()) for name in BY_NAME)
        most = {pair: int(gpus) for pair, gpus in pairs.items()}
        known = Known(int(row["tokens"]), int(row["parameters"]), most, of_trainers=row["family"] == "memory")
        numbers = {name: int(row[name]) for name in ("runs", "sources", "worse")}
        ends = BandEnds(*(float(row[f"{side}_percent"]) / 100 for side in ("below", "above")))
        widths = {trainer: float(factor) for trainer, factor in factors.items()}
        band = Band(ends, **numbers, known=known, factors=widths, errors=errors)
        families[row["family"]] = (*families.get(row["family"], ()), band)
    return families


def narrow_only_near(factor: float, distance: int) -> float:
    """Return a trainer's factor, at least 1 for a plan unlike any run, to which its small errors do not extend."""
    return max(1.0, factor) if distance else factor


def find_band(job: Job, cluster: Cluster, family: str = "") -> Band:
    """Return the band of `family` or of the step time, which widens with the trainer's errors and unseen properties."""
    nearest, *farther = bands()[family or ("moe" if job.model.experts else "dense")]
    distance = len(nearest.known.missing(job, cluster))
    band = [nearest, *farther][min(distance, len(farther))]
    kinds = [factor for trainer, factor in band.factors.items() if trainer.startswith(f"{job.trainer}-")]
    factor = narrow_only_near(band.factors.get(job.trainer) or max(kinds, default=1.0), distance)
    return replace(band, ends=BandEnds(min(LARGEST_SHARE, factor * band.ends.below), factor * band.ends.above))
