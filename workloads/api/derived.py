"""The names of the metrics that `sweeper/metrics/derivation.py` derives. No workload may set them."""

from __future__ import annotations

# What a measurement reports for each derived metric.
SOURCES = {
    "steps": "step_times_s",
    "effective_steps": "step_times_s",
    "step_time_ms": "step_times_s",
    "tokens_per_s": "step_times_s and tokens_per_step",
    "tflops": "step_times_s and flops_per_step",
    "tflops_sustained": "sustained_step_times_s and flops_per_step",
    "tflops_slowest_gpu": "the step_times_s of every rank and flops_per_step",
    "tflops_fastest_gpu": "the step_times_s of every rank and flops_per_step",
    "gpu_spread": "the step_times_s of every rank and flops_per_step",
    "gb_per_s": "step_times_s and bytes_per_step",
    "bandwidth_utilization": "step_times_s and bytes_per_step",
    "mfu": "step_times_s, flops_per_step and matrix_dtype",
    "mfu_sustained": "sustained_step_times_s, flops_per_step and matrix_dtype",
    "hfu": "step_times_s, hardware_flops_per_step and matrix_dtype",
    "mamf_utilization": "step_times_s, flops_per_step and tokens_per_step",
    "speedup": "step_times_s and baseline_step_times_s",
    "joules_per_step": "energy",
    "average_power_w": "energy",
    "joules_per_token": "energy and tokens_per_step",
    "tokens_per_joule": "energy and tokens_per_step",
    "tflop_per_joule": "energy and flops_per_step",
    "cost_per_million_tokens": "step_times_s, tokens_per_step and energy",
}
SUFFIXES = ("_p10", "_p90", "_ci_low", "_ci_high", "_per_gpu")  # of spread and interval before `_per_gpu`


def find_source(name: str) -> str | None:
    """Return what a derived metric is computed from; None for any other metric."""
    for suffix in SUFFIXES:
        name = name.removesuffix(suffix)
    return SOURCES.get(name)
