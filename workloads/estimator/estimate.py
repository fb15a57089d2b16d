"""What the planner says of a job: where each millisecond and each GiB goes."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from workloads.hardware.cluster import Cluster
from workloads.layouts.layout import Job


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step on the slowest GPU's critical path, by use. Communication counts where nothing hides it."""

    products: float  # matrix products of the blocks, forward, backward and recomputed
    attention: float  # scores and their product with the values, forward, backward and recomputed
    head_and_loss: float  # the output layer and the loss
    other_compute: float  # norms, activations, casts and the rest that the memory's bandwidth limits
    bubble: float = 0.0  # a pipeline's stage waits for others
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
    """GiB of a GPU of one pipeline stage at its peak, by use."""

    parameters: float  # weights as they are stored between steps, masters included
    gathered: float  # weights that are gathered for their use, and copies in the data type of the products
    gradients: float  # as they are accumulated
    optimizer_states: float  # the moments
    activations: float  # what is kept for the backward pass
    working: float  # temporary tensors of the largest layer or of the loss
    runtime: float  # the context, the communication library's buffers and the libraries' workspaces
    reserved: float = 0.0  # what the allocator holds beyond what it gave out

    @property
    def allocated_gib(self) -> float:
        """What the framework reports as its peak of allocated memory: neither `runtime` nor `reserved`."""
        return self.total_gib - self.runtime - self.reserved

    @property
    def reserved_gib(self) -> float:
        """What the framework reports as its peak of reserved memory."""
        return self.total_gib - self.runtime

    @property
    def needed_gib(self) -> float:
        """What the driver reports as used while the allocator returns all that it holds beyond what it gave out."""
        return self.total_gib - self.reserved

    @property
    def total_gib(self) -> float:
        """What the driver reports as used."""
        return float(sum(vars(self).values()))


@dataclass(frozen=True)
class JobEstimate:
    """The estimate of a job on a cluster."""

    step: StepTime  # where the time goes
    stages: tuple[StageMemory, ...]  # the memory of each pipeline rank
    tokens: int  # trained in a step by all GPUs
    model_flops: float  # of a step, by the causal convention (`workloads.models.flops`)
    peak_tflops: float | None  # of one GPU in the data type of the products, for the MFU; None where no source has it
    gpus: int  # the number of GPUs
    not_modelled: tuple[str, ...] = ()  # what the job has that the estimate leaves out, in plain sentences

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
    """What runs of a family show: pairs `trainer@device`, the most GPUs and the most tokens of a sequence."""

    gpus: int
    tokens: int
    pairs: frozenset[str]

    def missing(self, job: Job, cluster: Cluster) -> list[str]:
        """Return what of a job no run has, in plain words."""
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
    """The band around estimates of a family of jobs, at a distance from the runs that it rests on."""

    # half its width, of memory what it has above an estimate: it covers 90% of the runs that lack as much, each
    # estimated and compared without its own source
    error_share: float
    runs: int  # of this family, at any distance
    sources: int
    low: int  # of these runs, estimated to be faster, or to need less memory, than was measured
    known: Known

    @property
    def meaning(self) -> str:
        runs = f"{self.runs} measured runs of {self.sources} sources"
        return f"{COVERED:.0%} of {runs}, each left out, are within it, {self.low} of them above the estimate"


@cache
def bands() -> dict[str, tuple[Band, ...]]:
    """Return the bands of each family by distance: how much of a job no run has, from nothing on."""
    families: dict[str, tuple[Band, ...]] = {}
    with BANDS.open(newline="") as lines:
        for row in csv.DictReader(lines):
            known = Known(int(row["gpus"]), int(row["tokens"]), frozenset(row["pairs"].split()))
            numbers = {name: int(row[name]) for name in ("runs", "sources", "low")}
            band = Band(float(row["error_percent"]) / 100, **numbers, known=known)
            families[row["family"]] = (*families.get(row["family"], ()), band)
    return families


def find_band(job: Job, cluster: Cluster, family: str = "") -> Band:
    """Return the band of a job's step time, or of another family: wider, the more of the job no run has."""
    nearest, *farther = bands()[family or ("moe" if job.model.experts else "dense")]
    distance = len(nearest.known.missing(job, cluster))
    return [nearest, *farther][min(distance, len(farther))]
