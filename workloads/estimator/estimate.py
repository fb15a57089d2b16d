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
COVERED = 0.9  # of the runs are within the band
FEW_RUNS = 10  # fewer are all within it


@dataclass(frozen=True)
class Band:
    """The band around estimates of a family of jobs."""

    error_share: float  # half its width: 90% of the published runs, estimated without their source, and of later ones
    runs: int  # of this family, published and later
    low: int  # of these, estimated to be faster, or to need less memory, than was measured
    gpus: int  # the most of a published run, as `tokens` of a sequence
    tokens: int
    devices: frozenset[str]  # those of the published runs, as the trainers
    trainers: frozenset[str]

    @property
    def meaning(self) -> str:
        most = "all" if self.runs < FEW_RUNS else f"{COVERED:.0%}"
        return f"{most} of {self.runs} measured runs are within it, {self.low} of them above the estimate"

    def missing(self, job: Job, cluster: Cluster) -> list[str]:
        """Return what of a job no published run has, in plain words."""
        lacks = [f"on {cluster.device.name}"] if cluster.device.name not in self.devices else []
        if not any(trainer.startswith(job.trainer) for trainer in self.trainers):  # megatron: megatron-lm, …
            lacks.append(f"of trainer={job.trainer}")
        lacks += [f"on more than {self.gpus:,} GPUs"] * (cluster.gpus > self.gpus)
        lacks += [f"of more than {self.tokens:,} tokens a sequence"] * (job.sequence_length > self.tokens)
        return [f"no published run {lacking} is among those that the band rests on" for lacking in lacks]


@cache
def bands() -> dict[str, Band]:
    with BANDS.open(newline="") as lines:
        return {
            row["family"]: Band(
                error_share=float(row["error_percent"]) / 100,
                **{name: int(row[name]) for name in ("runs", "low", "gpus", "tokens")},
                devices=frozenset(row["devices"].split()),
                trainers=frozenset(row["trainers"].split()),
            )
            for row in csv.DictReader(lines)
        }


def find_band(job: Job) -> Band:
    return bands()["moe" if job.model.experts else "dense"]


def half_width(errors: list[float]) -> float:
    """Return the smallest band, in percent, that covers 90% of the errors; of few runs all of them."""
    sizes = sorted(abs(error) for error in errors)
    covered = len(sizes) if len(sizes) < FEW_RUNS else -(-len(sizes) * 9 // 10)
    return sizes[covered - 1]
