"""The rules that make a job valid on a number of GPUs, whatever trainer runs it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from workloads.estimator.cluster import Cluster
from workloads.layouts.job import V_SCHEDULES, Job

DEGREES = ("dp_replicate", "dp_shard", "tp", "cp", "pp")


@dataclass(frozen=True)
class Violation:
    """A rule that a job breaks, and the reason with its numbers."""

    rule: str
    reason: str


def find_violation(job: Job, cluster: Cluster) -> Violation | None:
    """Return the first rule that the job breaks on the cluster; None for a valid job."""
    violations = (Violation(rule, reason) for rule, check in RULES.items() if (reason := check(job, cluster)))
    return next(violations, None)


def _check_gpus(job: Job, cluster: Cluster) -> str:
    if job.layout.gpus == cluster.gpus:
        return ""
    degrees = " x ".join(f"{name} {getattr(job.layout, name)}" for name in DEGREES)
    return f"{degrees} = {job.layout.gpus} GPUs, but there are {cluster.gpus}"


def _check_tp(job: Job, cluster: Cluster) -> str:
    model = job.model
    sizes = {
        "heads": model.heads,
        "key-value heads": model.kv_heads,
        "hidden size": model.hidden_size,
        "intermediate size": model.intermediate_size,
        "tokens of a sequence on a GPU": job.sequence_length // job.layout.cp,
    }
    tp = job.layout.tp
    return next((f"tp {tp} does not divide {size} {name}" for name, size in sizes.items() if size % tp), "")


def _check_tp_in_domain(job: Job, cluster: Cluster) -> str:
    domain = cluster.topology.gpus_per_domain
    if job.layout.tp <= domain:
        return ""
    return f"tp {job.layout.tp} does not fit in a domain of {domain} GPUs that links connect"


def _check_cp(job: Job, cluster: Cluster) -> str:
    parts = 2 * job.layout.cp  # a GPU has one part from the front and one from the back, so that all do equal work
    if job.layout.cp == 1 or job.sequence_length % parts == 0:
        return ""
    return f"cp {job.layout.cp} needs a sequence length divisible by {parts}, {job.sequence_length} is not"


def _check_batch(job: Job, cluster: Cluster) -> str:
    layout = job.layout
    if layout.global_batch % (layout.micro_batch * layout.dp) == 0:
        return ""
    product = f"micro-batch {layout.micro_batch} x data parallel {layout.dp}"
    return f"global batch {layout.global_batch} is not a multiple of {product}"


def _check_stages(job: Job, cluster: Cluster) -> str:
    layout = job.layout
    stages = layout.pp * layout.stages_per_rank
    if stages > job.model.layers:
        return f"{stages} stages, but the model has {job.model.layers} layers"
    if layout.pp == 1:
        is_default = layout.stages_per_rank == 1 and layout.schedule == "1f1b"
        return "" if is_default else "pp 1 is not a pipeline: it needs stages_per_rank 1 and schedule 1f1b"
    if layout.schedule in V_SCHEDULES and layout.stages_per_rank != 2:
        return f"schedule {layout.schedule} needs stages_per_rank 2"
    if (layout.schedule == "1f1b") != (layout.stages_per_rank == 1):
        return f"schedule {layout.schedule} needs stages_per_rank {'1' if layout.schedule == '1f1b' else 'above 1'}"
    return ""


def _check_layers_per_stage(job: Job, cluster: Cluster) -> str:
    sizes, layout = job.layout.layers_per_stage, job.layout
    if sizes is None:
        return ""
    stages = layout.pp * layout.stages_per_rank
    if len(sizes) != stages:
        count = f"pp {layout.pp} x stages_per_rank {layout.stages_per_rank} = {stages} stages"
        return f"layers_per_stage has {len(sizes)} numbers, but {count}"
    if sum(sizes) != job.model.layers or min(sizes) < 1:
        return f"layers_per_stage adds up to {sum(sizes)}; it needs {job.model.layers} layers, 1 or more in a stage"
    return ""


def _check_microbatches(job: Job, cluster: Cluster) -> str:
    layout = job.layout
    if layout.pp == 1:
        return ""
    if layout.microbatches < layout.pp:
        return f"{layout.microbatches} micro-batches do not fill a pipeline of {layout.pp} ranks"
    if layout.schedule == "interleaved" and layout.microbatches % layout.pp:  # Megatron-LM: schedules.py
        return f"schedule interleaved needs a multiple of {layout.pp} micro-batches, {layout.microbatches} is not"
    if layout.schedule == "dualpipev" and layout.microbatches < 2 * layout.pp:
        return f"schedule dualpipev needs {2 * layout.pp} micro-batches, one for each stage"
    rounds = layout.microbatches // layout.pp
    if layout.schedule == "zero_bubble" and layout.microbatches % rounds:
        return f"schedule zero_bubble needs a multiple of {rounds} micro-batches, {layout.microbatches} is not"
    return ""


def _check_experts(job: Job, cluster: Cluster) -> str:
    layout, experts = job.layout, job.model.experts
    if layout.ep == 1:
        return ""
    if not experts:
        return f"ep {layout.ep}: the model has no experts"
    if experts % layout.ep:
        return f"ep {layout.ep} does not divide {experts} experts"
    if (layout.gpus // layout.pp) % layout.ep:
        return f"ep {layout.ep} does not divide the {layout.gpus // layout.pp} GPUs of a pipeline rank"
    return ""


def _check_sharding(job: Job, cluster: Cluster) -> str:
    layout = job.layout
    if layout.sharding == "none" and layout.dp_shard > 1:
        return f"dp_shard {layout.dp_shard} shards states, but sharding is none"
    if not layout.reshard_after_forward and layout.dp_shard * layout.cp == 1:
        return "dp_shard 1 and cp 1 shard no weights: reshard_after_forward has to be true"
    return ""


def _check_precision(job: Job, cluster: Cluster) -> str:
    peaks = cluster.device.peak_tflops
    dtype = matrix_dtype(job.precision)
    if not peaks or dtype in peaks:
        return ""
    return f"{job.precision}: {cluster.device.name} has no {dtype} units or no known peak for them"


def matrix_dtype(precision: str) -> str:
    """Return the data type of a recipe's matrix products, as a device's peaks name it: `fp8` of `fp8_tensorwise`."""
    name = precision.split("_")[0]
    return {"mxfp8": "fp8", "nvfp4": "fp4", "mxfp4": "fp4"}.get(name, name)


RULES: dict[str, Callable[[Job, Cluster], str]] = {
    "the degrees multiply to the number of GPUs": _check_gpus,
    "tp divides heads, sizes and sequence": _check_tp,
    "tp stays within a domain": _check_tp_in_domain,
    "cp divides the sequence": _check_cp,
    "micro-batches divide the global batch": _check_batch,
    "stages and schedule agree": _check_stages,
    "layers_per_stage divides the layers": _check_layers_per_stage,
    "micro-batches fill the pipeline": _check_microbatches,
    "ep divides the experts": _check_experts,
    "only sharded states are sharded": _check_sharding,
    "the device has the data type": _check_precision,
}
