"""The planner's estimate of a job, which accounts for each millisecond and each GiB."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from workloads.hardware.cluster import Cluster
from workloads.layouts.layout import Job


@dataclass(frozen=True)
class StepTime:
    """The seconds of a step on the slowest GPU's critical path, by use. Only exposed communication counts."""

    products: float  # GEMMs in blocks, forward, backward and recomputed
    attention: float  # scores and their product with the values, forward, backward and recomputed
    head_and_loss: float  # the output layer and the loss
    other_compute: float  # norms, activations, casts and other operations that are limited by memory bandwidth
    bubble: float = 0.0  # the time for which a pipeline stage waits for others
    # Communication by kind.
    data_parallel: float = 0.0
    tensor_parallel: float = 0.0
    context_parallel: float = 0.0
    expert_parallel: float = 0.0
    pipeline: float = 0.0
    optimizer: float = 0.0  # the optimizer's step, on the GPU or the host
    copies: float = 0.0  # copies of gathered weights and gradients, and between host and GPU

    @property
    def total_s(self) -> float:
        return float(sum(vars(self).values()))

    def scaled(self, factor: float) -> StepTime:
        return StepTime(**{name: factor * seconds for name, seconds in vars(self).items()})


@dataclass(frozen=True)
class StageMemory:
    """The peak GiB on a GPU of one pipeline stage, by use."""

    parameters: float  # weights as they are stored between steps, masters included
    gathered: float  # weights that are gathered for use, and copies in the data type of the GEMMs
    gradients: float  # as they are accumulated
    optimizer_states: float  # the moments
    activations: float  # tensors that are saved for the backward pass
    working: float  # temporary tensors of the largest layer or of the loss
    runtime: float  # the context, the communication library's buffers and the libraries' workspaces
    reserved: float = 0.0  # memory that the allocator has reserved but not allocated

    @property
    def allocated_gib(self) -> float:
        """The framework's reported peak of allocated memory, without `runtime` and `reserved`."""
        return self.total_gib - self.runtime - self.reserved

    @property
    def reserved_gib(self) -> float:
        """The framework's reported peak of reserved memory."""
        return self.total_gib - self.runtime

    @property
    def needed_gib(self) -> float:
        """The used memory that the driver would report if the allocator returned all unallocated memory."""
        return self.total_gib - self.reserved

    @property
    def total_gib(self) -> float:
        """The used memory that the driver reports."""
        return float(sum(vars(self).values()))


@dataclass(frozen=True)
class JobEstimate:
    """The estimate of a job on a cluster."""

    step: StepTime  # where the time goes
    stages: tuple[StageMemory, ...]  # the memory of each pipeline rank
    tokens: int  # trained on per step by all GPUs
    model_flops: float  # per step, by the causal convention (`workloads.models.flops`)
    peak_tflops: float | None  # of one GPU in the data type of the products, for the MFU; None where no source has it
    gpus: int  # the number of GPUs
    not_modelled: tuple[str, ...] = ()  # properties of the job that the estimate ignores, in plain sentences

    @property
    def memory(self) -> StageMemory:
        return max(self.stages, key=lambda stage: stage.total_gib)

    @property
    def tokens_per_s_per_gpu(self) -> float:
        return self.tokens / self.step.total_s / self.gpus

    @property
    def mfu(self) -> float | None:
        """The share of the peak that the model's FLOPs reach, between 0 and 1."""
        if self.peak_tflops is None:
            return None
        return self.model_flops / self.step.total_s / self.gpus / (self.peak_tflops * 1e12)


BANDS = Path(__file__).parent / "tables" / "bands.csv"
COVERED = 0.9  # of the runs are within the band, each source with the same weight


@dataclass(frozen=True)
class Known:
    """The range of a family's runs: pairs `trainer@device`, the most GPUs, and the longest sequence in tokens."""

    gpus: int
    tokens: int
    pairs: frozenset[str]

    def missing(self, job: Job, cluster: Cluster) -> list[str]:
        """Return the properties of a job that no run has, in plain words."""
        device, known = cluster.device.name, [pair.split("@") for pair in self.pairs]
        trainers = {trainer for trainer, _ in known if trainer.startswith(job.trainer)}  # megatron: megatron-lm, …
        lacks = [f"on {device}"] if device not in {name for _, name in known} else []
        lacks += [] if trainers else [f"of trainer={job.trainer}"]
        if not lacks and not self.pairs & {f"{trainer}@{device}" for trainer in trainers}:
            lacks.append(f"of trainer={job.trainer} on {device}")
        # GLM-5.2 on 192 GB200, with the loss of its indexer and natural routing (benchmarks/planner_rows_2026.csv)
        selects = "with attention to selected tokens (the one published run took 8 times its estimate)"
        lacks += [selects] * bool(job.model.index_heads)
        lacks += [f"on more than {self.gpus:,} GPUs"] * (cluster.gpus > self.gpus)
        lacks += [f"of more than {self.tokens:,} tokens a sequence"] * (job.sequence_length > self.tokens)
        return [f"no measured run {lacking} is among those that the band rests on" for lacking in lacks]


@dataclass(frozen=True)
class Band:
    """The band around estimates for a family of jobs, at a distance from the runs on which it is based."""

    # Half the width of the band, or for memory the part above the estimate. It covers 90% of the runs at this distance,
    # each estimated and compared without its own source.
    error_share: float
    runs: int  # of this family, at any distance
    sources: int
    low: int  # the number of these runs that were estimated to be faster, or to need less memory, than measured
    known: Known

    @property
    def meaning(self) -> str:
        runs = f"{self.runs} measured runs of {self.sources} sources"
        return f"{COVERED:.0%} of {runs}, each left out, are within it, {self.low} of them above the estimate"


@cache
def bands() -> dict[str, tuple[Band, ...]]:
    """Return the bands of each family by distance: the number of a job's properties that no run has, from 0."""
    families: dict[str, tuple[Band, ...]] = {}
    with BANDS.open(newline="") as lines:
        for row in csv.DictReader(lines):
            known = Known(int(row["gpus"]), int(row["tokens"]), frozenset(row["pairs"].split()))
            numbers = {name: int(row[name]) for name in ("runs", "sources", "low")}
            band = Band(float(row["error_percent"]) / 100, **numbers, known=known)
            families[row["family"]] = (*families.get(row["family"], ()), band)
    return families


def find_band(job: Job, cluster: Cluster, family: str = "") -> Band:
    """Return the band of a job's step time, or of another family. It widens with the properties that no run has."""
    nearest, *farther = bands()[family or ("moe" if job.model.experts else "dense")]
    distance = len(nearest.known.missing(job, cluster))
    return [nearest, *farther][min(distance, len(farther))]
