"""Every metric of a trial, one row each: its unit and label, how it is better, what it is derived from, what it needs.

A new metric is one row here, and its formula in `sweeper/metrics/derivation.py` where it is derived. Tables, plots,
objectives and limits, the checks before a sweep and docs/metrics.md read these rows. A workload may report metrics that
have no row: they are shown under their names.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

# The largest relative difference that does not count between points of a front: rounds of one seed cannot show it.
# By default a thousandth: the last of the four digits that tables show, and 2 MiB, the step of an allocator, of 2 GiB.
RESOLUTION = 0.001
SUFFIXES = ("_p10", "_p90", "_ci_low", "_ci_high", "_per_gpu")  # of spread and interval before `_per_gpu`


class Need(StrEnum):
    """What a sweep needs to have a metric."""

    GPU = "a GPU"
    ENERGY = "a GPU whose energy is known"
    PEAK = "the device's dense peak"
    BANDWIDTH = "the device's memory bandwidth"
    CEILING = "a measured matmul rate"
    RANKS = "several ranks"
    PRICE = "a price"


@dataclass(frozen=True)
class Metric:
    """A metric of a trial."""

    name: str
    # of the displayed value; empty for a number without one and for fractions that are displayed as such
    unit: str = ""
    label: str = ""  # the head of its column; empty: tables show it only as an objective, under its name
    # how it is better, maximize or minimize; empty: neither is better, as of a clock or a dimension
    direction: str = ""
    factor: float = 1.0  # from the stored value to the displayed one
    resolution: float = RESOLUTION  # the largest relative difference between two points of a front that does not count
    source: str = ""  # what of a measurement it is derived from; empty: the workload reports it
    needs: Need | None = None
    # its place among the metrics that results are ranked by, the first that a trial has; 0: not one of them
    speed: int = 0
    is_rate: bool = False  # at equal work it is proportional to the speed

    @property
    def heading(self) -> str:
        """The head of its column: the label with the unit, else the name, which has the unit in it."""
        return f"{self.label} {self.unit}".strip() if self.label else self.name


COST = "cost_per_million_tokens"
MORE, LESS = "maximize", "minimize"
STEPS = "step_times_s"
FLOPS, TOKENS, BYTES = (f"{STEPS} and {count}_per_step" for count in ("flops", "tokens", "bytes"))
BASELINE = f"{STEPS} and baseline_step_times_s"
OF_RANKS = f"the {STEPS} of every rank and flops_per_step"
DTYPE = "flops_per_step and matrix_dtype"

# In the order of the columns of tables; those without a label follow.
ROWS = (
    Metric("m", "", "m"),
    Metric("n", "", "n"),
    Metric("k", "", "k"),
    Metric("tflops", "TFLOP/s", "rate", MORE, source=FLOPS, speed=2, is_rate=True),
    Metric("tflops_slowest_gpu", "TFLOP/s", "slowest", MORE, source=OF_RANKS, needs=Need.RANKS),
    Metric("tflops_fastest_gpu", "TFLOP/s", "fastest", source=OF_RANKS, needs=Need.RANKS),
    Metric("gpu_spread", "%", "spread", LESS, 100.0, source=OF_RANKS, needs=Need.RANKS),
    Metric("tflops_sustained", "TFLOP/s", "sustained", MORE, source=f"sustained_{FLOPS}"),
    Metric("sustained_sm_clock_mhz", "MHz", "at"),
    Metric("tokens_per_s", "tokens/s", "speed", MORE, source=TOKENS, speed=1, is_rate=True),
    Metric("mfu", "%", "MFU", MORE, 100.0, source=f"{STEPS}, {DTYPE}", needs=Need.PEAK, is_rate=True),
    Metric("hfu", "%", "HFU", MORE, 100.0, source=f"{STEPS}, hardware_{DTYPE}", needs=Need.PEAK, is_rate=True),
    Metric(
        *("mamf_utilization", "%", "of ceiling", MORE, 100.0),
        source=f"{STEPS}, flops_per_step and tokens_per_step",
        needs=Need.CEILING,
        is_rate=True,
    ),
    Metric("speedup", "x", "over bf16", MORE, source=BASELINE),
    Metric("speedup_ci_low", "", "95% from", source=BASELINE),
    Metric("speedup_ci_high", "", "to", source=BASELINE),
    Metric("predicted_speedup", "x", "predicted"),
    Metric("gb_per_s", "GB/s", "moves", MORE, source=BYTES, speed=3, is_rate=True),
    Metric("bus_gb_s", "GB/s", "bus", MORE, speed=4, is_rate=True),
    Metric("bandwidth_utilization", "%", "of memory", MORE, 100.0, source=BYTES, needs=Need.BANDWIDTH, is_rate=True),
    Metric("sqnr_db", "dB", "SQNR", MORE, resolution=0.03),  # a tenth of the error is 0.8 dB, of about 30
    Metric("sqnr_input_gradient_db", "dB", "of dx", MORE, resolution=0.03),
    Metric("sqnr_weight_gradient_db", "dB", "of dW", MORE, resolution=0.03),
    Metric("predicted_tokens_per_s", "tokens/s", "predicted"),
    Metric("tokens_per_joule", "tokens/J", "energy", MORE, source="energy and tokens_per_step", needs=Need.ENERGY),
    Metric("joules_per_token", "J/token", "energy", LESS, source="energy and tokens_per_step", needs=Need.ENERGY),
    Metric("tflop_per_joule", "TFLOP/J", "energy", MORE, source="energy and flops_per_step", needs=Need.ENERGY),
    Metric(COST, "cost", "10^6 tokens", LESS, source=f"{STEPS}, tokens_per_step and energy", needs=Need.PRICE),
    Metric("peak_device_gib", "GiB", "device", LESS, needs=Need.GPU),
    Metric("peak_host_gib", "GiB", "host", LESS),
    Metric("replanned_device_gib", "GiB", "replanned for"),
    Metric("loss", "", "loss", LESS),
    Metric("step_time_ms", "ms", "step", LESS, source=STEPS),
    Metric("sm_clock_mhz", "MHz", "clock"),
    Metric("average_power_w", "W", "average power", LESS, source="energy", needs=Need.ENERGY),
    Metric("power_w", "W", "power", LESS, needs=Need.GPU),
    Metric("score", "", "score", MORE, speed=5, is_rate=True),
    Metric("tflops_per_gpu", "TFLOP/s", "", MORE, source=FLOPS, needs=Need.RANKS),
    Metric("tokens_per_s_per_gpu", "tokens/s", "", MORE, source=TOKENS, needs=Need.RANKS),
    Metric("mfu_sustained", "", "", MORE, source=f"sustained_{STEPS}, {DTYPE}", needs=Need.PEAK),
    Metric("joules_per_step", "J", "", LESS, source="energy", needs=Need.ENERGY),
    Metric("steps", source=STEPS),
    Metric("effective_steps", source=STEPS),
    Metric("step_resolution_ms", source=STEPS),
    # The errors of one product differ by 3% (fp32) and 1.3% (bf16) between seeds, one standard deviation.
    Metric("relative_error", "", "", LESS, resolution=0.1),
    Metric("executed_imbalance"),
    Metric("experts_held"),
    Metric("rows"),
    Metric("peak_memory_gib", "GiB", "", LESS, needs=Need.GPU),
    Metric("peak_reserved_gib", "GiB"),
    Metric("copied_gib_per_step", "GiB", "", LESS),
    Metric("copy_wait_share", "", "", LESS),
    Metric("predicted_copy_wait_share"),
    Metric("optimizer_share", "", "", LESS),
    Metric("communication_share"),
    Metric("computation_share"),
    Metric("exposed_share"),
    Metric("idle_share"),
    Metric("temperature_c", "°C", "", LESS, needs=Need.GPU),
    Metric("first_loss"),
    Metric("gradient_norm"),
    Metric("memory_gib", "GiB"),
    Metric("rounds"),
    Metric("startup_s", "s"),
    Metric("sustained_settling_s", "s"),
    Metric("tuning_s", "s"),
    Metric("calls_per_reading"),
    Metric("event_cost_us", "µs"),
    Metric("trial_time_s", "s"),
)
METRICS = {metric.name: metric for metric in ROWS}


# Units of other metrics, such as a function's objective, by the ends of their names.
ENDINGS = {
    "_per_s": "/s",
    "_gb_s": "GB/s",
    "_ms": "ms",
    "_us": "µs",
    "_s": "s",
    "_mib": "MiB",
    "_gib": "GiB",
    "_w": "W",
}


def get_metric(name: str) -> Metric:
    unit = next((unit for end, unit in ENDINGS.items() if name.endswith(end)), "")
    return METRICS.get(name) or Metric(name, unit)


def find_source(name: str) -> str:
    """Return what a derived metric is computed from, also its spread and interval; empty for any other metric."""
    for suffix in SUFFIXES:
        name = name.removesuffix(suffix)
    return get_metric(name).source
