"""A job on a cluster with its trainer, and the sizes of one micro-batch on one GPU."""

from __future__ import annotations

from dataclasses import dataclass

from workloads.planner.cluster import Cluster
from workloads.planner.collectives import Group
from workloads.planner.job import Job, Model, TrainingLayout
from workloads.planner.precisions import Precision, find_precision
from workloads.planner.trainers import Trainer, find_trainer

# Kernels that are limited by the memory: of the bandwidth of the data sheet. Norms, activations and residual sums of a
# Llama 3 8B block move 8.6 GB for 16,384 tokens and take 3 ms on an H200 (benchmarks/offload.md, entry 14).
PASS_BANDWIDTH_SHARE = 0.6
COPY_BANDWIDTH_SHARE = 0.8  # of plain copies and of the optimizer's update


@dataclass(frozen=True)
class Setting:
    """A job, a cluster and the trainer's rules."""

    job: Job
    cluster: Cluster

    @property
    def model(self) -> Model:
        return self.job.model

    @property
    def layout(self) -> TrainingLayout:
        return self.job.layout

    @property
    def trainer(self) -> Trainer:
        return find_trainer(self.job.trainer)

    @property
    def precision(self) -> Precision:
        return find_precision(self.job.precision)

    @property
    def tokens(self) -> float:
        """The tokens of a micro-batch on a GPU, before tensor parallelism divides them."""
        return self.layout.micro_batch * self.job.sequence_length / self.layout.cp

    @property
    def residual_parts(self) -> int:
        """Into how many parts the residual stream is divided over tensor parallel ranks."""
        return self.layout.tp if self.layout.sequence_parallel else 1

    @property
    def is_sharded(self) -> bool:
        """Whether weights are gathered for each use."""
        return self.layout.sharding in ("fsdp1", "fsdp2", "megatron_fsdp")

    @property
    def gradient_bytes(self) -> int:
        return self.job.gradient_bytes or self.trainer.gradient_bytes

    @property
    def tensor_group(self) -> Group:
        return Group(self.layout.tp, 1)

    @property
    def context_group(self) -> Group:
        return Group(self.layout.cp, self.layout.tp)

    @property
    def shard_group(self) -> Group:
        """The ranks that divide weights or optimizer states."""
        ranks = self.layout.dp_shard * self.layout.cp
        return Group(ranks, self.layout.tp)

    @property
    def replicate_group(self) -> Group:
        return Group(self.layout.dp_replicate, self.layout.tp * self.shard_group.ranks)

    @property
    def expert_group(self) -> Group:
        return Group(self.layout.ep, 1)

    def pass_s(self, total_bytes: float) -> float:
        """Return the seconds of kernels that read and write so many bytes."""
        return total_bytes / (self.cluster.device.memory_gb_s * 1e9 * PASS_BANDWIDTH_SHARE)

    def copy_s(self, total_bytes: float) -> float:
        return total_bytes / (self.cluster.device.memory_gb_s * 1e9 * COPY_BANDWIDTH_SHARE)
