"""A job on a cluster with its trainer, and the sizes of one micro-batch on one GPU."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from workloads.planner.cluster import Cluster
from workloads.planner.collectives import Group
from workloads.planner.job import AttentionKernel, Job, Model, TrainingLayout
from workloads.planner.precisions import Precision, find_precision
from workloads.planner.trainers import Trainer, find_trainer

# Plain copies and the optimizer's update reach this share of the bandwidth of the data sheet.
COPY_SHARE = 0.85
# What norms, activations and residual sums take beyond their copies, for their instructions: those of a Llama 3 8B
# block move 8.6 GB for 16,384 tokens and take 3 ms on an H200 at 4.8 TB/s (benchmarks/offload.md, entry 14).
PASS_INSTRUCTIONS_GB_S = 9_800


@dataclass(frozen=True)
class Setting:
    """A job, a cluster and the trainer's rules."""

    job: Job
    cluster: Cluster

    @cached_property
    def model(self) -> Model:
        return self.job.model

    @cached_property
    def layout(self) -> TrainingLayout:
        return self.job.layout

    @cached_property
    def trainer(self) -> Trainer:
        return find_trainer(self.job.trainer)

    @cached_property
    def attention_kernel(self) -> AttentionKernel:
        return self.job.attention_kernel or self.trainer.attention

    @cached_property
    def precision(self) -> Precision:
        return find_precision(self.job.precision)

    @cached_property
    def tokens(self) -> float:
        """The tokens of a micro-batch on a GPU, before tensor parallelism divides them."""
        return self.layout.micro_batch * self.job.sequence_length / self.layout.cp

    @cached_property
    def residual_parts(self) -> int:
        """Into how many parts the residual stream is divided over tensor parallel ranks."""
        return self.layout.tp if self.layout.sequence_parallel else 1

    @cached_property
    def is_sharded(self) -> bool:
        """Whether weights are gathered for each use."""
        return self.layout.sharding in ("fsdp1", "fsdp2", "megatron_fsdp")

    @cached_property
    def gradient_bytes(self) -> int:
        if self.job.gradient_bytes:
            return self.job.gradient_bytes
        # Megatron FSDP's guide advises --grad-reduce-in-bf16.
        return 2 if self.layout.sharding == "megatron_fsdp" else self.trainer.gradient_bytes

    @cached_property
    def tensor_group(self) -> Group:
        return Group(self.layout.tp, 1)

    @cached_property
    def context_group(self) -> Group:
        return Group(self.layout.cp, self.layout.tp)

    @cached_property
    def shard_group(self) -> Group:
        """The ranks that divide weights or optimizer states."""
        ranks = self.layout.dp_shard * self.layout.cp
        return Group(ranks, self.layout.tp)

    @cached_property
    def replicate_group(self) -> Group:
        return Group(self.layout.dp_replicate, self.layout.tp * self.shard_group.ranks)

    @cached_property
    def expert_group(self) -> Group:
        return Group(self.layout.ep, 1)

    @cached_property
    def expert_shard_group(self) -> Group:
        """The ranks that have the same experts, and divide their weights or optimizer states."""
        return Group(max(1, self.shard_group.ranks * self.layout.tp // self.layout.ep), self.layout.ep)

    def pass_s(self, total_bytes: float, instructions_gb_s: float = PASS_INSTRUCTIONS_GB_S) -> float:
        """Return the seconds of kernels that read and write so many bytes."""
        return self.copy_s(total_bytes) + total_bytes / (instructions_gb_s * 1e9)

    def copy_s(self, total_bytes: float) -> float:
        return total_bytes / (self.cluster.device.memory_gb_s * 1e9 * COPY_SHARE)
