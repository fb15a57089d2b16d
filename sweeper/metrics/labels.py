"""How metrics are called in tables and plots, and why one has no interval there."""

from __future__ import annotations

from collections.abc import Mapping

from workloads.api.derived import find_source

MIN_STEPS = 5  # the fewest whose median has an interval
TOO_FEW = f"fewer than {MIN_STEPS} steps"
TOO_SHORT = "correlated, too short"

# A metric in a table: its label, its unit, and the factor from the stored value to the displayed one.
DISPLAY = {
    "m": ("m", "", 1.0),
    "n": ("n", "", 1.0),
    "k": ("k", "", 1.0),
    "tflops": ("rate", "TFLOP/s", 1.0),
    "tflops_slowest_gpu": ("slowest", "TFLOP/s", 1.0),
    "tflops_fastest_gpu": ("fastest", "TFLOP/s", 1.0),
    "gpu_spread": ("spread", "%", 100.0),
    "tflops_sustained": ("sustained", "TFLOP/s", 1.0),
    "sustained_sm_clock_mhz": ("at", "MHz", 1.0),
    "tokens_per_s": ("speed", "tokens/s", 1.0),
    "mfu": ("MFU", "%", 100.0),
    "hfu": ("HFU", "%", 100.0),
    "mamf_utilization": ("of ceiling", "%", 100.0),
    "speedup": ("over bf16", "x", 1.0),
    "speedup_ci_low": ("95% from", "", 1.0),
    "speedup_ci_high": ("to", "", 1.0),
    "predicted_speedup": ("predicted", "x", 1.0),
    "gb_per_s": ("moves", "GB/s", 1.0),
    "bus_gb_s": ("bus", "GB/s", 1.0),
    "bandwidth_utilization": ("of memory", "%", 100.0),
    "sqnr_db": ("SQNR", "dB", 1.0),
    "sqnr_input_gradient_db": ("of dx", "dB", 1.0),
    "sqnr_weight_gradient_db": ("of dW", "dB", 1.0),
    "predicted_tokens_per_s": ("predicted", "tokens/s", 1.0),
    "tokens_per_joule": ("energy", "tokens/J", 1.0),
    "joules_per_token": ("energy", "J/token", 1.0),
    "tflop_per_joule": ("energy", "TFLOP/J", 1.0),
    "cost_per_million_tokens": ("10^6 tokens", "cost", 1.0),
    "peak_device_gib": ("device", "GiB", 1.0),
    "peak_host_gib": ("host", "GiB", 1.0),
    "loss": ("loss", "", 1.0),
    "step_time_ms": ("step", "ms", 1.0),
    "sm_clock_mhz": ("clock", "MHz", 1.0),
    "average_power_w": ("average power", "W", 1.0),
    "power_w": ("power", "W", 1.0),
    "score": ("score", "", 1.0),
}


def missing_reason(metrics: Mapping[str, float], name: str) -> str:
    """Return why the metric `name` has no 95% interval; empty if it has one or is not derived from steps."""
    source = find_source(name)
    if source is None or "energy" in source or f"{name}_ci_low" in metrics or "effective_steps" not in metrics:
        return ""  # the energy is one reading for all steps
    return TOO_FEW if metrics["steps"] < MIN_STEPS else TOO_SHORT
