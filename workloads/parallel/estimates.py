"""A layout of this project's trainer as a job of the planner, and the planner's estimate of it. No torch."""

from __future__ import annotations

from workloads.api.contract import Machine
from workloads.estimator.memory import peak_memory_gib
from workloads.estimator.precisions import find_precision
from workloads.estimator.setting import Setting as PlannerSetting
from workloads.estimator.step import estimate_step
from workloads.layouts.job import Job, TrainingLayout
from workloads.models.flops import model_flops_per_token
from workloads.parallel.layout import Layout, Setting, uses_fsdp

SHARED_FIELDS = (
    *("dp_replicate", "dp_shard", "tp", "cp", "pp", "stages_per_rank", "schedule", "micro_batch", "global_batch"),
    *("checkpointing", "reshard_after_forward", "cp_method"),
)


def build_job(layout: Layout, setting: Setting) -> Job:
    """Return what the planner estimates for a layout.

    Documents that are packed into a sequence count as documents of one length whose attention costs as much.
    """
    return Job(
        model=setting.shape,
        layout=TrainingLayout(
            **{name: getattr(layout, name) for name in SHARED_FIELDS},
            sharding="fsdp2" if uses_fsdp(layout, setting.state) else "none",
            checkpointed_layers=_checkpointed_layers(layout, setting.shape.layers),
            tp_overlap="async" if layout.async_tp else "none",
        ),
        sequence_length=setting.sequence_length,
        trainer="own",
        precision=setting.dtype,
        state=setting.state,
        compiled=setting.compiled,
        manual_backward=setting.block == "manual",
        document_tokens=round(setting.attended_length) if setting.document_tokens else 0,
    )


def _checkpointed_layers(layout: Layout, layers: int) -> int | None:
    """Return how many of the model's blocks are checkpointed, as the planner counts them; None for all or none."""
    is_partial = layout.checkpointing_freq > 1 and layout.checkpointing != "none"
    return layers // layout.checkpointing_freq if is_partial else None


def estimate_memory_gib(layout: Layout, setting: Setting, machine: Machine) -> float:
    """Estimate the memory of the pipeline rank that needs the most, as the driver reports it."""
    return peak_memory_gib(PlannerSetting(build_job(layout, setting), machine.cluster))


def estimate_speed(layout: Layout, setting: Setting, machine: Machine) -> dict[str, float]:
    """Estimate the metrics of a layout's speed; the MFU where the device's peak is known."""
    job, cluster = build_job(layout, setting), machine.cluster
    step_s = estimate_step(job, cluster).total_s
    tokens_per_s = layout.global_batch * setting.sequence_length / step_s
    metrics = {"tokens_per_s": tokens_per_s, "step_time_ms": 1e3 * step_s}
    if peak_tflops := cluster.device.peak_tflops.get(find_precision(job.precision).dtype):
        flops_per_token = model_flops_per_token(job.model, setting.attended_length)
        metrics["mfu"] = tokens_per_s * flops_per_token / cluster.gpus / (1e12 * peak_tflops)
    return metrics
