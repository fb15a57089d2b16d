"""Every layout of a job on a number of GPUs: all degrees that the number allows, and what a trainer offers beside."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from workloads.planner.cluster import Cluster
from workloads.planner.job import Job, TrainingLayout
from workloads.planner.rules import find_violation

MAX_MICRO_BATCH = 16  # sequences; a larger one fills the GPU no better
MAX_STAGES_PER_RANK = 16


@dataclass(frozen=True)
class Family:
    """Layouts that differ only in what trades memory for time: checkpointing and resharding.

    Attributes:
        fastest: the layout that recomputes and gathers the least. Where its step is too slow, all others are slower.
        others: the slower ones, which need less memory.
    """

    fastest: TrainingLayout
    others: tuple[TrainingLayout, ...]


def list_families(
    job: Job, cluster: Cluster, options: Mapping[str, Sequence[Any]], fixed: Mapping[str, Any]
) -> Iterator[Family]:
    """Yield the valid layouts of a job, in families: those that shard more first, and small micro-batches first.

    Args:
        job: the model, the sequence length and the trainer; of its layout the global batch alone counts.
        options: the values that the trainer offers of `schedule`, `sharding`, `checkpointing` and
            `reshard_after_forward`; of the last two the fastest first.
        fixed: fields of the layout that have one value.
    """
    for layout in _list_divisions(job, cluster, options, fixed):
        variants = tuple(
            replace(layout, checkpointing=checkpointing, reshard_after_forward=reshard)
            for checkpointing in _values("checkpointing", options, fixed)
            for reshard in _resharding(layout, options, fixed)
        )
        if variants and find_violation(replace(job, layout=variants[0]), cluster) is None:
            yield Family(variants[0], variants[1:])


def _resharding(
    layout: TrainingLayout, options: Mapping[str, Sequence[Any]], fixed: Mapping[str, Any]
) -> Sequence[Any]:
    if layout.dp_shard * layout.cp == 1:  # nothing is sharded
        return [True] if fixed.get("reshard_after_forward", True) else []
    return _values("reshard_after_forward", options, fixed)


def _values(name: str, options: Mapping[str, Sequence[Any]], fixed: Mapping[str, Any]) -> Sequence[Any]:
    return [fixed[name]] if name in fixed else options[name]


def _list_divisions(
    job: Job, cluster: Cluster, options: Mapping[str, Sequence[Any]], fixed: Mapping[str, Any]
) -> Iterator[TrainingLayout]:
    """Yield the divisions of the GPUs and of the batch, those without a pipeline and with few tensor ranks first."""
    model, base = job.model, replace(job.layout, **fixed)
    for degrees in _list_degrees(job, cluster, fixed):
        sequences, remainder = divmod(base.global_batch, degrees["dp_replicate"] * degrees["dp_shard"])
        if remainder or not sequences:
            continue
        expert_degrees = divisors(model.experts) if model.experts else (1,)
        for ep in _degree("ep", expert_degrees, fixed):
            is_sharded = degrees["dp_shard"] * degrees["cp"] > 1
            shardings: Sequence[Any] = _values("sharding", options, fixed) if is_sharded else ["none"]
            for sharding in shardings:
                for schedule, stages in _list_pipelines(job, degrees["pp"], options, fixed):
                    for micro_batch in _degree("micro_batch", divisors(sequences), fixed):
                        if micro_batch > MAX_MICRO_BATCH and "micro_batch" not in fixed:
                            break
                        yield replace(
                            base,
                            **degrees,
                            ep=ep,
                            sharding=sharding,
                            schedule=schedule,
                            stages_per_rank=stages,
                            micro_batch=micro_batch,
                        )


def _list_degrees(job: Job, cluster: Cluster, fixed: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    model, gpus = job.model, cluster.gpus
    for pp in _degree("pp", divisors(gpus), fixed):
        if pp > model.layers:
            continue
        for tp in _degree("tp", divisors(gpus // pp), fixed):
            if tp > cluster.topology.gpus_per_domain or model.heads % tp or model.kv_heads % tp:
                continue
            for cp in _degree("cp", divisors(gpus // pp // tp), fixed):
                if cp > 1 and job.sequence_length % (2 * cp):
                    continue
                data_parallel = gpus // pp // tp // cp
                for dp_shard in _degree("dp_shard", divisors(data_parallel)[::-1], fixed):
                    dp_replicate = data_parallel // dp_shard
                    if fixed.get("dp_replicate", dp_replicate) == dp_replicate:
                        yield {"dp_replicate": dp_replicate, "dp_shard": dp_shard, "tp": tp, "cp": cp, "pp": pp}


def _degree(name: str, values: Sequence[int], fixed: Mapping[str, Any]) -> Sequence[int]:
    """Return the values of a degree; of a fixed one its value, if it is one of them."""
    return [value for value in values if value == fixed[name]] if name in fixed else values


def _list_pipelines(
    job: Job, pp: int, options: Mapping[str, Sequence[Any]], fixed: Mapping[str, Any]
) -> Iterator[tuple[Any, int]]:
    """Yield the schedules of a pipeline with the stages of each rank."""
    if pp == 1:
        if fixed.get("schedule", "1f1b") == "1f1b" and fixed.get("stages_per_rank", 1) == 1:
            yield "1f1b", 1
        return
    layers = job.model.layers // pp if job.model.layers % pp == 0 else 1
    several = [count for count in divisors(layers) if 1 < count <= MAX_STAGES_PER_RANK]
    for schedule in _values("schedule", options, fixed):
        counts = {"1f1b": [1], "zbv": [2], "dualpipev": [2]}.get(str(schedule), several)
        for stages in _degree("stages_per_rank", counts, fixed):
            yield schedule, stages


@cache
def divisors(number: int) -> tuple[int, ...]:
    """Return the divisors of a number, ascending."""
    small = [divisor for divisor in range(1, int(number**0.5) + 1) if number % divisor == 0]
    return tuple(sorted({*small, *(number // divisor for divisor in small)}))
