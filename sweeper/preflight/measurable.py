"""Objectives and limits that the chosen devices cannot measure, refused before anything starts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sweeper.config.hardware import Target
from sweeper.config.resolution import ResolvedConfig
from sweeper.config.schema import Config
from workloads.api import registry
from workloads.api.errors import UserInputError
from workloads.api.metrics import Need, find_source, get_metric


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
    name, hardware = target.hardware.name, target.hardware
    base = metric.removesuffix("_per_gpu")
    match get_metric(base).needs:
        case Need.PRICE:
            yield from _find_missing_prices(config, is_on_cpu=is_ours and not target.is_gpu)
        case Need.ENERGY if is_ours and not target.is_gpu:
            yield "no driver reports the energy of a CPU; choose a GPU by hardware="
        case Need.GPU if is_ours and not reports_own and not target.is_gpu:
            yield "it is read from a GPU, and this sweep runs on a CPU; choose a GPU by hardware="
        case Need.PEAK if not hardware.dense_peak_tflops:
            yield f"the dense peak of {name} is not known; use tflops, or set hardware.dense_peak_tflops="
        case Need.BANDWIDTH if not hardware.bandwidth_tb_s:
            yield f"the bandwidth of {name} is not known; use gb_per_s, or set hardware.bandwidth_tb_s="
        case Need.CEILING if not devices.has_ceiling:
            yield f"no matmul rate of {target.model} was measured; run workload=matmul first"
    is_of_several = get_metric(metric).needs is Need.RANKS or (metric != base and find_source(base))
    if devices.gpus == 1 and is_of_several:
        yield "it compares the ranks of a trial, which has one; set gpus="


def _find_missing_prices(config: Config, *, is_on_cpu: bool) -> Iterator[str]:
    if config.price_per_hour is None and config.price_per_kwh is None:
        yield "there is no price; set price_per_hour= or price_per_kwh="
    elif config.price_per_kwh is not None and is_on_cpu:
        yield "no driver reports the energy of a CPU, to which price_per_kwh= applies; use price_per_hour= alone"
