"""A job placed on a cluster: its trainer's rules, its micro-batch sizes, and the weights on each GPU."""

from __future__ import annotations

from dataclasses import dataclass

from workloads.estimator.pipeline import RankLayers, head_rank
from workloads.hardware.cluster import Cluster, Group
from workloads.hardware.precisions import PRECISIONS
from workloads.layouts.layout import AttentionKernel, Job
from workloads.layouts.trainers import Trainer, find_trainer, is_own

# Plain copies and the optimizer update reach this share of the data sheet's memory bandwidth.
COPY_SHARE = 0.85
# Norms, activations and residual sums also spend time on instructions, at this rate. In a Llama 3 8B block, these
# passes move 8.6 GB for 16,384 tokens and take 3 ms on an H200 with 4.8 TB/s (benchmarks/offload.md, entry 14).
PASS_INSTRUCTIONS_GB_S = 9_800


class PlacedJob:
    """A job, its cluster and its trainer's rules, with values that several parts of the estimate use."""

    def __init__(self, job: Job, cluster: Cluster) -> None:
        layout = job.layout
        self.job, self.cluster, self.model, self.layout = job, cluster, job.model, layout
        self.trainer: Trainer = find_trainer(job.trainer)
        self.precision = PRECISIONS[job.precision]
        self.attention_kernel: AttentionKernel = job.attention_kernel or self.trainer.attention
        self.checkpointed_share = layout.count_checkpointed(job.model.layers) / job.model.layers  # share of the blocks
        # The share of blocks that recompute their whole forward pass.
        self.repeated_share = self.checkpointed_share if layout.checkpointing == "full" else 0.0
        # The share of repeated tensor-parallel collectives. With saved GEMM outputs, only gathers repeat.
        gathers_again = layout.checkpointing in ("selective", "per_op")
        self.repeated_collectives_share = self.checkpointed_share / 2 if gathers_again else self.repeated_share
        self.tokens = layout.micro_batch * job.sequence_length / layout.cp  # per micro-batch on a GPU
        self.imbalance = min(job.expert_imbalance, layout.ep)  # one of ep ranks can have all tokens at most
        # Rows of a rank's buffers, divided by the mean. This project's trainer has room for all rows that may come with
        # natural routing, and its elementwise operations pass over all of them (`workloads.llama.experts`).
        self.buffered_rows = self.imbalance
        if job.expert_loads == "natural" and is_own(job) and layout.ep > 1:
            self.buffered_rows = layout.ep * min(1.0, job.model.experts // layout.ep / job.model.experts_per_token)
        self.residual_parts = layout.tp if layout.sequence_parallel else 1  # number of parts of the residual stream
        self.is_sharded = layout.sharding in ("fsdp1", "fsdp2", "megatron_fsdp")  # weights are gathered for each use
        # Megatron FSDP's guide advises --grad-reduce-in-bf16.
        is_short = layout.sharding == "megatron_fsdp" or job.state == "bf16"
        usual = 2 if is_short else self.trainer.gradient_bytes
        # The data type of attention and the head.
        self.plain_dtype = self.precision.dtype if self.precision.dtype in ("fp16", "fp32") else "bf16"
        self.element_bytes = 4 if job.precision == "fp32" else 2  # per weight in a GEMM, and per activation
        self.gradient_bytes = job.gradient_bytes or usual  # per gradient in its reduction
        # Bytes per gathered weight. A block with a manual backward pass casts after gathering.
        self.gathered_bytes = self.element_bytes if job.manual_backward else self.precision.gathered_bytes
        # Casts per weight and micro-batch. Transformer Engine keeps the step's first cast (`is_first_microbatch`), and
        # so does this project's block with a manual backward pass if FSDP does not gather its weights again.
        keeps_casts = self.trainer.core == "megatron" and not self.is_sharded and self.precision.weight_bytes > 0
        keeps_casts |= job.manual_backward and layout.is_sharded and not layout.reshard_after_forward
        self.weight_casts = 1 / layout.microbatches if keeps_casts else 1.0
        # Whether FSDP reduces gradients in each micro-batch (`workloads.parallel.apply.set_gradient_sync`).
        self.reduces_each = layout.reshard_after_forward or (job.manual_backward and layout.pp == 1)
        self.plain_share = job.bf16_blocks / job.model.layers  # share of the blocks
        # torchtitan saves aten.mm and what PyTorch's partitioner calls compute-intensive (activation_checkpoint.py at
        # b5bcd76c), and not the _scaled_mm_v2 that torchao's NVFP4 calls.
        self.saves_products = job.precision != "nvfp4_torchao"
        self.tensor_group = Group(layout.tp, 1)
        self.context_group = Group(layout.cp, layout.tp)
        # Ranks that divide the weights or optimizer states outside experts (`shard_group`) and inside experts.
        self.shard_group = Group(layout.dp_shard * layout.cp, layout.tp)
        self.replicate_group = Group(layout.dp_replicate, layout.tp * self.shard_group.ranks)
        self.expert_group = Group(layout.ep, 1)
        shards = max(1, self.shard_group.ranks * layout.tp // layout.ep)
        self.expert_shard_group = Group(shards, layout.ep)
        self.expert_copies_group = Group(1, layout.ep)  # ranks that hold the same experts, outside replicas and shards
        if is_own(job) and layout.ep == 1:  # tensor-parallel ranks hold copies
            self.expert_shard_group, self.expert_copies_group = self.shard_group, self.tensor_group
        elif is_own(job):  # experts that ranks divide are not sharded
            self.expert_shard_group, self.expert_copies_group = Group(1, layout.ep), self.expert_shard_group

    def pass_s(self, total_bytes: float, instructions_gb_s: float = PASS_INSTRUCTIONS_GB_S) -> float:
        return self.copy_s(total_bytes) + total_bytes / (instructions_gb_s * 1e9)

    def copy_s(self, total_bytes: float) -> float:
        device = self.cluster.device
        return total_bytes / (1e9 * (device.copy_gb_s or COPY_SHARE * device.memory_gb_s))


@dataclass(frozen=True)
class Weights:
    """The number of unsharded weights on one GPU: weights `shared` by all data-parallel ranks, and expert weights."""

    shared: float
    experts: float = 0.0

    @property
    def total(self) -> float:
        return self.shared + self.experts


def block_gpu_weights(placed: PlacedJob, layer: int) -> Weights:
    layout, (shared, mlp, experts) = placed.layout, placed.model.layer_weights[layer]
    # In this project's trainer, tensor-parallel ranks hold whole routers and shared experts.
    whole = mlp if is_own(placed.job) and experts else 0
    return Weights((shared - whole) / layout.tp + whole, experts / layout.ep)


def end_weights(placed: PlacedJob, rank: int) -> Weights:
    """Return the embedding and head weights on one GPU of a pipeline rank; zero if the rank has neither."""
    model, ends = placed.model, 0
    if rank == 0:
        ends += model.embedding_weights
    if rank == head_rank(placed.layout) and not (model.tied and rank == 0):
        ends += model.head_weights
    return Weights(ends / placed.layout.tp)


def rank_weights(placed: PlacedJob, rank: int, layers: tuple[RankLayers, ...]) -> Weights:
    """Return the weights on one GPU of a pipeline rank, including the embedding and the head if the rank has them."""
    blocks = [(block_gpu_weights(placed, some.layer), some.number) for some in layers]
    shared = end_weights(placed, rank).shared + sum(block.shared * count for block, count in blocks)
    return Weights(shared, sum(block.experts * count for block, count in blocks))


def divided_weights(placed: PlacedJob, weights: Weights) -> float:
    """Return the number of weights, or of their states, that a GPU keeps if data-parallel ranks divide them."""
    return weights.shared / placed.shard_group.ranks + weights.experts / placed.expert_shard_group.ranks


# AdamW reads the weight, its gradient and two moments, and writes all but the gradient: 28 bytes in fp32. The bf16 copy
# takes 2 more bytes, and clipping reads the gradients once more.
UPDATE_BYTES = {"fp32": 34, "amp": 32, "bf16": 16, "int8": 16}
# The host memory bandwidth of AdamW's update on a host with eight GPUs. Assumed to be a quarter of the 600 GB/s of two
# sockets with DDR5, because we know of no microbenchmark.
HOST_GB_S = 150


def optimizer_s(placed: PlacedJob, owned_weights: float) -> float:
    update_bytes = UPDATE_BYTES[placed.job.state] * owned_weights
    if not placed.layout.offload_optimizer:
        rate = placed.cluster.device.update_gb_s
        return update_bytes / (1e9 * rate) if rate else placed.copy_s(update_bytes)
    gpus = min(placed.cluster.gpus, placed.cluster.topology.gpus_per_domain)
    return update_bytes * gpus / (HOST_GB_S * 1e9)
