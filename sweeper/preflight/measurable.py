"""Objectives and limits that the chosen devices cannot measure, refused before anything starts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sweeper.config.hardware import Target
from sweeper.config.resolution import ResolvedConfig
from sweeper.metrics.energy import COST
from workloads.api import registry
from workloads.api.derived import find_source
from workloads.api.errors import UserInputError

READ_FROM_GPUS = ("peak_device_gib", "peak_memory_gib", "power_w", "temperature_c")
OF_THE_PEAK = ("mfu", "mfu_sustained", "hfu")
OF_SEVERAL = ("tflops_slowest_gpu", "tflops_fastest_gpu", "gpu_spread")


@dataclass(frozen=True)
class Devices:
    """What decides which metrics a trial can have.

    Attributes:
        gpus: ranks of a trial.
        has_ceiling: a matmul rate was measured on such a device.
    """

    target: Target
    gpus: int
    has_ceiling: bool


def check_measurable(resolved: ResolvedConfig, devices: Devices) -> None:
    """Check the metrics of the objectives and limits against the devices.

    A workload of another distribution may measure what this project's own do not, so only what follows from the
    hardware's description, the number of ranks and the prices is refused there.

    Raises:
        UserInputError: no trial could have one of them.
    """
    criteria = resolved.criteria
    keys = dict.fromkeys(criteria.metrics, "objective")
    keys |= {limit.metric: f"limits.{limit.metric}" for limit in criteria.limits if limit.metric not in keys}
    for metric, key in keys.items():
        if reason := next(_find_reasons(metric, resolved, devices), ""):
            text = f"{key}={metric}" if key == "objective" else key
            raise UserInputError(f"{text}: is not measured here: {reason}")


def _find_reasons(metric: str, resolved: ResolvedConfig, devices: Devices) -> Iterator[str]:
    """Yield why no trial has a metric; nothing if one may."""
    target, config = devices.target, resolved.config
    is_ours = registry.find_entry_point(config.workload.name) is None
    reports_own = resolved.workload.Settings is not None  # a command's log or a function may have any raw metric
    source, base = find_source(metric) or "", metric.removesuffix("_per_gpu")
    if metric == COST:
        yield from _find_missing_prices(resolved, devices, is_ours=is_ours)
    elif is_ours and source.startswith("energy") and not target.is_gpu:
        yield "no driver reports the energy of a CPU; choose a GPU by hardware="
    if is_ours and not reports_own and metric in READ_FROM_GPUS and not target.is_gpu:
        yield "it is read from a GPU, and this sweep runs on a CPU; choose a GPU by hardware="
    if base in OF_THE_PEAK and not target.hardware.dense_peak_tflops:
        yield f"the dense peak of {target.hardware.name} is not known; use tflops, or set hardware.dense_peak_tflops="
    if base == "bandwidth_utilization" and not target.hardware.bandwidth_tb_s:
        yield f"the bandwidth of {target.hardware.name} is not known; use gb_per_s, or set hardware.bandwidth_tb_s="
    if base == "mamf_utilization" and not devices.has_ceiling:
        yield f"no matmul rate of {target.model} was measured; run workload=matmul first"
    if devices.gpus == 1 and (base in OF_SEVERAL or (source and metric.endswith("_per_gpu"))):
        yield "it compares the ranks of a trial, which has one; set gpus="


def _find_missing_prices(resolved: ResolvedConfig, devices: Devices, *, is_ours: bool) -> Iterator[str]:
    config = resolved.config
    if config.price_per_hour is None and config.price_per_kwh is None:
        yield "there is no price; set price_per_hour= or price_per_kwh="
    elif config.price_per_kwh is not None and is_ours and not devices.target.is_gpu:
        yield "no driver reports the energy of a CPU, to which price_per_kwh= applies; use price_per_hour= alone"
