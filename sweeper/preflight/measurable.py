"""Objectives and limits that the chosen devices cannot measure, refused before anything starts."""

from __future__ import annotations

from collections.abc import Iterator

from sweeper.config.hardware import Target
from sweeper.config.resolution import ResolvedConfig
from workloads.api import registry
from workloads.api.errors import UserInputError
from workloads.api.metrics import Need, find_source, get_metric


def check_measurable(resolved: ResolvedConfig, target: Target, gpus: int, *, has_ceiling: bool) -> None:
    """Check the metrics of the objectives and limits against the devices.

    A workload of another distribution may measure what this project's own do not, so only what follows from the
    hardware's description, the number of ranks and the prices is refused there.

    Args:
        gpus: ranks of a trial.
        has_ceiling: a matmul rate was measured on such a device.

    Raises:
        UserInputError: no trial could have one of them.
    """
    criteria = resolved.criteria
    keys = dict.fromkeys(criteria.metrics, "objective")
    keys |= {limit.metric: f"limits.{limit.metric}" for limit in criteria.limits if limit.metric not in keys}
    for metric, key in keys.items():
        if reason := next(_find_reasons(metric, resolved, target, gpus, has_ceiling), ""):
            text = f"{key}={metric}" if key == "objective" else key
            raise UserInputError(f"{text}: is not measured here: {reason}")


def _find_reasons(metric: str, resolved: ResolvedConfig, target: Target, gpus: int, has_ceiling: bool) -> Iterator[str]:
    """Yield why no trial has a metric; nothing if one may."""
    config, hardware, name = resolved.config, target.hardware, target.hardware.name
    reads_cpu = registry.find_entry_point(config.workload.name) is None and not target.is_gpu  # by our own workload
    reports_own = resolved.workload.Settings is not None  # a command's log or a function may have any raw metric
    base = metric.removesuffix("_per_gpu")
    match get_metric(base).needs:
        case Need.PRICE if config.price_per_hour is None and config.price_per_kwh is None:
            yield "there is no price; set price_per_hour= or price_per_kwh="
        case Need.PRICE if config.price_per_kwh is not None and reads_cpu:
            yield "no driver reports the energy of a CPU, to which price_per_kwh= applies; use price_per_hour= alone"
        case Need.ENERGY if reads_cpu:
            yield "no driver reports the energy of a CPU; choose a GPU by hardware="
        case Need.GPU if reads_cpu and not reports_own:
            yield "it is read from a GPU, and this sweep runs on a CPU; choose a GPU by hardware="
        case Need.PEAK if not hardware.dense_peak_tflops:
            yield f"the dense peak of {name} is not known; use tflops, or set hardware.dense_peak_tflops="
        case Need.BANDWIDTH if not hardware.bandwidth_tb_s:
            yield f"the bandwidth of {name} is not known; use gb_per_s, or set hardware.bandwidth_tb_s="
        case Need.CEILING if not has_ceiling:
            yield f"no matmul rate of {target.model} was measured; run workload=matmul first"
    is_of_several = get_metric(metric).needs is Need.RANKS or (metric != base and find_source(base))
    if gpus == 1 and is_of_several:
        yield "it compares the ranks of a trial, which has one; set gpus="
