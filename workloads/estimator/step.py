"""Estimate a job's step time and memory."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from workloads.estimator import communication, operations, placed_job
from workloads.estimator.communication import ELEMENT, copied_bytes, exposed, host_copies_s
from workloads.estimator.estimate import JobEstimate, StepTime
from workloads.estimator.memory import stage_memories
from workloads.estimator.operations import Seconds
from workloads.estimator.own_trainer import is_counted, keeps_weights
from workloads.estimator.pipeline import PassTimes, bubble_s, head_rank, rank_layers
from workloads.estimator.placed_job import PlacedJob, Weights, divided_weights
from workloads.hardware.cluster import Cluster, Group
from workloads.hardware.precisions import peak_tflops
from workloads.layouts.layout import Job, vary
from workloads.layouts.trainers import find_efficiency, is_own
from workloads.models.flops import model_flops_per_token


@dataclass(frozen=True)
class BlockTime:
    """A block's time in seconds for one micro-batch. Only exposed communication counts."""

    forward: Seconds
    backward: Seconds
    tensor: float
    context: float
    expert: float
    data: float
    copies: float

    @property
    def total(self) -> float:
        exchanges = self.tensor + self.context + self.expert + self.data
        return self.forward.total + self.backward.total + exchanges + self.copies


# Seconds that a micro-batch takes longer for each GiB beyond the usable memory: 0.23 in both measured layouts, which
# lack 1.8 and 2.4 GiB on H100s (results/parallel_h100.md, trainers_h100.md). Memory of other trainers is less certain.
STALL_S_PER_GIB = 0.23


def estimate_job(job: Job, cluster: Cluster, efficiency: float | None = None) -> JobEstimate:
    """Estimate a job. `efficiency` is the share of the kernels' rates that the trainer reaches; calibrated by default.

    Raises ValueError if the device has no matrix units for the precision, KeyError for an unknown trainer or precision.
    """
    placed = PlacedJob(job, cluster)
    tokens, stages = job.layout.global_batch * job.sequence_length, stage_memories(placed)
    lacking_gib = max(stage.needed_gib for stage in stages) - cluster.usable_gib if is_counted(placed) else 0.0
    stalls_s = STALL_S_PER_GIB * max(0.0, lacking_gib) * job.layout.microbatches
    return JobEstimate(
        step=replace(_estimate_step(placed, efficiency), stalls=stalls_s),
        stages=stages,
        tokens=tokens,
        model_flops=tokens * model_flops_per_token(job.model, job.sequence_length),
        peak_tflops=peak_tflops(cluster.device, job.precision),
        gpus=job.layout.gpus,
        not_modelled=tuple(_not_modelled(placed)),
    )


def step_seconds(job: Job, cluster: Cluster) -> float:
    return _estimate_step(PlacedJob(job, cluster)).total_s


def step_bound_s(job: Job, cluster: Cluster, *, any_stages: int = 0) -> float:
    """Return a lower bound on the job's step time in seconds, for any division of data-parallel ranks into replicas
    and for any division of layers into at most `any_stages` stages per rank of 1F1B or interleaved schedules: as if all
    ranks took the same time. 0 is for the job's own stages.

    The bound omits data parallelism, the optimizer and copies, and is not lower for later values of `checkpointing`.
    Each omitted part only adds time: waiting leaves power for higher clocks in other parts, but higher clocks save less
    time than the waiting costs.
    """
    return _estimate_step(PlacedJob(job, cluster), with_data_parallel=False, any_stages=any_stages).total_s


def rank_seconds(job: Job, cluster: Cluster) -> list[PassTimes]:
    """Return each pipeline rank's pass times for a micro-batch, for a timeline. Times are scaled to match
    `estimate_job`, which uses the slowest rank."""
    placed, layout = PlacedJob(job, cluster), job.layout
    efficiency = find_efficiency(job.trainer, cluster.device.name)
    kinds = placed.model.layer_kinds.values()
    blocks = {layer: _block_time(placed, layer, efficiency, with_data_parallel=True) for layer in kinds}
    passes = _rank_passes(placed, blocks, operations.head_s(placed) / efficiency)
    step = _estimate_step(placed, efficiency)
    busy_s = step.total_s - step.bubble - step.optimizer - step.pipeline - step.data_parallel
    slowest = max(range(layout.pp), key=lambda rank: passes[rank].total)
    data_s = sum(blocks[some.layer].data * some.number for some in rank_layers(placed.model, layout)[slowest])
    scale = (busy_s / layout.microbatches + data_s) / passes[slowest].total
    return [PassTimes(*(scale * seconds for seconds in vars(times).values())) for times in passes]


def _rank_passes(placed: PlacedJob, blocks: Mapping[int, BlockTime], head_s: float) -> list[PassTimes]:
    """Return each pipeline rank's pass times for a micro-batch.

    Exposed communication and copies are split evenly between the directions. The gradients of weights take as long as
    the forward pass's GEMMs.
    """
    ranks, head = rank_layers(placed.model, placed.layout), head_rank(placed.layout)
    times = {}
    for layers in set(ranks):
        counts = [(blocks[some.layer], some.number) for some in layers]
        forward = sum(block.forward.total * count for block, count in counts)
        backward = sum(block.backward.total * count for block, count in counts)
        rest = (sum(block.total * count for block, count in counts) - forward - backward) / 2
        weights = sum(block.forward.products * count for block, count in counts)
        times[layers] = PassTimes(forward + rest, backward + rest, weights)
    passes, third = [times[layers] for layers in ranks], head_s / 3
    last = passes[head]
    passes[head] = PassTimes(last.forward + third, last.backward + 2 * third, last.backward_weight + third)
    return passes


# GPU waiting time per step for launches of the step, the optimizer and the logging: the median time beyond the estimate
# of six layouts in this project's trainer on two H200s (planner_rows_h200_fp32.csv). A graph of the step has none.
STEP_OVERHEAD_S = 0.025
# The share of the power cap that a GPU does not draw while it waits for other GPUs or for data. A pipeline of two H200s
# that wait 21% of the time has 1.10 times the rate that the wait implies (benchmarks/results/parallel_h200.md). GEMM
# rates follow power to the exponent 0.62 (hardware/device_rates.csv). Both were chosen after these runs.
IDLE_POWER_SHARE = 0.6
POWER_EXPONENT = 0.62


def _estimate_step(
    placed: PlacedJob, efficiency: float | None = None, *, with_data_parallel: bool = True, any_stages: int = 0
) -> StepTime:
    """Estimate the step at the clocks that the power cap allows. The cap limits mean power, including while waiting."""
    efficiency = efficiency or find_efficiency(placed.job.trainer, placed.cluster.device.name)
    step = _step_time(placed, efficiency, with_data_parallel, any_stages)
    waiting = (step.bubble + step.data_parallel + step.tensor_parallel + step.context_parallel) / step.total_s
    waiting += (step.expert_parallel + step.pipeline) / step.total_s
    uplift = min(placed.cluster.device.power_headroom, (1 - IDLE_POWER_SHARE * waiting) ** -POWER_EXPONENT)
    limited = {name: getattr(step, name) / uplift for name in ("products", "attention", "head_and_loss")}
    return vary(step, **limited)


def _step_time(placed: PlacedJob, efficiency: float, with_data_parallel: bool, any_stages: int) -> StepTime:
    layout, micro = placed.layout, placed.layout.microbatches
    ranks = rank_layers(placed.model, layout)
    kinds = placed.model.layer_kinds.values()
    blocks = {layer: _block_time(placed, layer, efficiency, with_data_parallel) for layer in kinds}
    head = operations.head_s(placed) / efficiency
    passes = _rank_passes(placed, blocks, head)
    slowest = max(range(layout.pp), key=lambda rank: passes[rank].total)
    counts = [(blocks[layers.layer], float(layers.number * micro)) for layers in ranks[slowest]]
    heads, bubble = float(micro * (slowest == head_rank(layout))), bubble_s(passes, layout)
    if any_stages:
        counts = [(blocks[layers.layer], layers.number * micro / layout.pp) for rank in ranks for layers in rank]
        heads, bubble = micro / layout.pp, sum(times.total for times in passes) * (1 - 1 / layout.pp) / any_stages
    is_sent = layout.pp > 1 and not any_stages
    sends = 2 * communication.pipeline_send_s(placed) * layout.stages_per_rank * micro if is_sent else 0.0
    step = StepTime(
        products=sum((block.forward.products + block.backward.products) * count for block, count in counts),
        attention=sum((block.forward.attention + block.backward.attention) * count for block, count in counts),
        head_and_loss=head * heads,
        other_compute=sum((block.forward.other + block.backward.other) * count for block, count in counts),
        bubble=bubble,
        tensor_parallel=sum(block.tensor * count for block, count in counts),
        context_parallel=sum(block.context * count for block, count in counts),
        expert_parallel=sum(block.expert * count for block, count in counts),
        # All schedules but 1F1B hide sends between stages.
        pipeline=exposed(sends, float("inf")) if layout.schedule != "1f1b" else sends,
    )
    if not with_data_parallel:
        return step
    weights = placed_job.rank_weights(placed, slowest, ranks[slowest])
    waits_s = 0.0 if layout.cuda_graph else STEP_OVERHEAD_S * operations.launch_ratio(placed.cluster.device)
    owned = weights.total if layout.sharding == "none" else divided_weights(placed, weights)  # updated by one GPU
    return replace(
        step,
        data_parallel=sum(block.data * count for block, count in counts)
        + _step_data_parallel_s(placed, weights, passes[slowest].total)
        + communication.copies_sum_s(placed, weights, per_step=True),
        optimizer=placed_job.optimizer_s(placed, owned) + waits_s,
        copies=sum(block.copies * count for block, count in counts)
        + _copies_s(placed, placed_job.end_weights(placed, slowest)) * micro
        + host_copies_s(placed, owned),
    )


def _block_time(placed: PlacedJob, layer: int, efficiency: float, with_data_parallel: bool) -> BlockTime:
    layout, trainer, is_repeated = placed.layout, placed.trainer, placed.repeated_share
    block = operations.block_seconds(placed, layer)
    forward = block.forward * (1 / efficiency)
    backward = (block.backward + block.recomputed * placed.checkpointed_share) * (1 / efficiency)
    data = copies = 0.0
    if with_data_parallel:
        weights = placed_job.block_gpu_weights(placed, layer)
        copies = _copies_s(placed, weights)
        if placed.reduces_each and placed.is_sharded:
            # Weights are gathered, at most twice, and gradients reduced in each micro-batch.
            gather = communication.sharded_s(placed, weights, placed.gathered_bytes)
            reduce = communication.sharded_s(placed, weights, placed.gradient_bytes)
            reduce += 0.0 if trainer.averages_copies_once else communication.average_s(placed, weights)
            # Only the first micro-batch gathers before its forward pass if the others reuse weights left gathered.
            reshards = layout.reshard_after_forward
            first_share = 1 / layout.microbatches if keeps_weights(placed) or not reshards else 1.0
            data = exposed(gather, forward.total) * first_share + exposed(gather * reshards + reduce, backward.total)
            data += communication.copies_sum_s(placed, weights, per_step=False)
    context = 0.0
    if placed.model.mixer(layer) == "attention":
        context = communication.context_s(placed, forward.attention, backward=False) * (1 + is_repeated)
        context += communication.context_s(placed, backward.attention, backward=True)
    time = BlockTime(
        forward,
        backward,
        tensor=communication.tensor_s(placed, layer) * (2 + placed.repeated_collectives_share),
        context=context,
        expert=communication.expert_s(placed, layer) * (2 + is_repeated),
        data=data,
        copies=copies,
    )
    launches_s = operations.LAUNCHES_S * operations.launch_ratio(placed.cluster.device) * (1 + is_repeated / 3)
    hidden_s = 0.0 if placed.job.waits_for_launches else time.total
    waits = placed.job.waits_for_launches or operations.waits_for_host(placed, layer)
    return vary(time, forward=forward + Seconds(other=max(0.0, launches_s - hidden_s) * waits))


def _copies_s(placed: PlacedJob, weights: Weights) -> float:
    """Estimate how many seconds a micro-batch's weight and gradient copies take: casts, collective buffers and sums."""
    shared, experts = (copied_bytes(placed, group.ranks) for group in (placed.shard_group, placed.expert_shard_group))
    return placed.copy_s(weights.shared * shared + weights.experts * experts)


def _step_data_parallel_s(placed: PlacedJob, weights: Weights, micro_batch_s: float) -> float:
    layout = placed.layout
    reduce = communication.sharded_s(placed, weights, placed.gradient_bytes) + communication.average_s(placed, weights)
    gather = communication.sharded_s(placed, weights, placed.gathered_bytes)
    # Nothing overlaps the embedding's gather, which comes first, or the reduction of the embedding's gradients. FSDP2
    # wraps the embedding; Megatron's last bucket contains it (core/distributed/param_and_grad_buffer.py at d98e8a64).
    embedding = Weights(placed.model.embedding_weights / layout.tp)
    first_s = communication.sharded_s(placed, embedding, ELEMENT + placed.gradient_bytes)
    if placed.is_sharded and placed.reduces_each:
        first_s *= layout.microbatches
        if not layout.reshard_after_forward:  # gathered once per step
            first_s -= (layout.microbatches - 1) * communication.sharded_s(placed, embedding, ELEMENT)
        if layout.sharding != "fsdp2":  # the first block's gather and reduction
            first_s = (reduce + gather) / max(1, placed.model.layers / layout.pp)
        if not placed.trainer.averages_copies_once:
            return first_s
        return first_s + exposed(communication.average_s(placed, weights), micro_batch_s * 2 / 3)
    if layout.sharding == "none":
        group, total_bytes = Group(layout.dp * layout.cp, layout.tp), weights.total * placed.gradient_bytes
        reduce, gather = communication.all_reduce_s(placed.cluster, group, total_bytes), 0.0
        first_s = reduce * embedding.total / weights.total
    if not placed.trainer.overlaps_data_parallel:
        return reduce + gather
    rest = 1 - min(1.0, first_s / (reduce + gather)) if reduce + gather else 0.0  # share that overlaps with blocks
    return first_s + exposed(rest * reduce, micro_batch_s * 2 / 3) + exposed(rest * gather, micro_batch_s / 3)


def _not_modelled(placed: PlacedJob) -> Iterator[str]:
    device = placed.cluster.device
    if placed.layout.tp > placed.cluster.topology.gpus_per_domain:
        yield "tensor parallelism over the network: latency of small messages under load"
    if device.architecture not in ("sm80", "sm90", "sm100", "sm103"):
        yield f"attention's own rate on {device.name}: no source has it, shares of an H200's stand in"
    if placed.model.index_heads:
        yield "the kernels of attention to selected tokens and of its indexer: no source has their rates"
    if placed.model.experts and placed.job.expert_loads == "equal":
        yield "natural routing: forced balance is assumed, and expert_imbalance= takes the rank_imbalance of a trial"
    if placed.expert_group.ranks > placed.cluster.topology.gpus_per_domain and placed.job.dispatcher == "alltoall":
        yield "faster exchanges of tokens than all-to-all (DeepEP, routing to few nodes, overlap)"
    if placed.model.experts and not is_own(placed.job) and placed.cluster.device.launch_us is None:
        yield "waiting for the host in mixtures of experts, but for an assumed constant"
    if placed.layout.offload_optimizer:
        yield "the host's memory bandwidth: an assumed constant"
