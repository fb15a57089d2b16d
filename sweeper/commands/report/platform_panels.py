"""Training on several platforms in nine panels, as numbers for plotly and matplotlib alike.

A platform is a kind of device and how many of them. All panels show one kind of work, so every axis compares.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from sweeper.pages.chart_style import COLOURS
from sweeper.results.ranking import SPEED_UNITS, BestResult, MeasuredValue, read_value

VENDORS = re.compile(r"\b(NVIDIA|AMD Instinct|AMD) ")
UNKNOWN = MeasuredValue(math.nan)
NOTE = (
    "Bars are the best configuration of each platform, lines on them its 95% interval. The matmul ceiling is the "
    "highest rate that a search of matrix products achieved on such a device; the peak is the vendor's dense one."
)


@dataclass(frozen=True)
class Panel:
    """One panel.

    Attributes:
        series: bars by name, one for each platform.
        spread: all values of each platform, for boxes instead of bars.
    """

    title: str
    unit: str
    series: dict[str, list[MeasuredValue]] = field(default_factory=dict)
    spread: list[list[float]] = field(default_factory=list)

    @property
    def known_series(self) -> dict[str, list[MeasuredValue]]:
        """The series that have a value."""
        return {
            name: values
            for name, values in self.series.items()
            if not all(math.isnan(measured.value) for measured in values)
        }

    @property
    def is_empty(self) -> bool:
        return not self.known_series and not any(self.spread)


def list_names(results: Sequence[BestResult]) -> list[str]:
    """Return short names of the platforms, without the vendor."""
    return [VENDORS.sub("", result.platform) for result in results]


def list_colours(results: Sequence[BestResult]) -> list[str]:
    """Return a colour for each result: one for each device, for any number of them."""
    devices = list(dict.fromkeys(result.device for result in results))
    return [COLOURS[devices.index(result.device) % len(COLOURS)] for result in results]


def build_error_bars(values: Sequence[MeasuredValue]) -> dict[str, list[float]] | None:
    """Return the intervals as plotly's error bars, None if no value has one."""
    if not any(measured.has_interval for measured in values):
        return None
    return {
        "array": [measured.error_above for measured in values],
        "arrayminus": [measured.error_below for measured in values],
    }


def build_panels(results: Sequence[BestResult]) -> list[Panel]:
    """Return the nine panels of results that are judged by tokens/s; of other work one panel with its speed."""
    if results[0].speed_metric != "tokens_per_s":
        return [Panel("", SPEED_UNITS[results[0].speed_metric], {"": [result.speed for result in results]})]
    rank = results[0].rank_noun
    tokens_per_gpu = [_read_per_gpu(result, "tokens_per_s") for result in results]
    tflops_per_gpu = [_read_per_gpu(result, "tflops") for result in results]
    spread = [list(result.trials["metric.tokens_per_s"] / result.devices) for result in results]
    return [
        Panel("Tokens", "tokens/s", {"": [result.speed for result in results]}),
        Panel("Computation", "TFLOP/s", {"": [read_value(result.trial, "tflops") for result in results]}),
        Panel("Utilisation of the peak", "%", {name.upper(): _read_percent(results, name) for name in ("mfu", "hfu")}),
        Panel(f"Tokens per {rank}", f"tokens/s per {rank}", {"": tokens_per_gpu}),
        Panel(f"Computation per {rank}", f"TFLOP/s per {rank}", {"": tflops_per_gpu}),
        Panel("Achieved rate and ceilings", f"TFLOP/s per {rank}", _compute_ceilings(results, tflops_per_gpu)),
        Panel("Step time", "ms", {"": [MeasuredValue(result.get_metric("step_time_ms")) for result in results]}),
        Panel("All configurations", f"tokens/s per {rank}", spread=spread),
        Panel("Best over median configuration", "times", {"": [_compute_gain(result) for result in results]}),
    ]


def _read_per_gpu(result: BestResult, metric: str) -> MeasuredValue:
    return read_value(result.trial, metric).divide(result.devices)


def _read_percent(results: Sequence[BestResult], metric: str) -> list[MeasuredValue]:
    return [MeasuredValue(100 * result.get_metric(metric)) for result in results]


def _compute_ceilings(results: Sequence[BestResult], achieved: list[MeasuredValue]) -> dict[str, list[MeasuredValue]]:
    """Return the achieved rates, and the ceilings that follow from their shares of them."""
    shares = {"matmul ceiling": "mamf_utilization", "peak": "mfu"}
    ceilings = {
        name: [
            MeasuredValue(rate.value / (result.get_metric(share) or math.nan))
            for rate, result in zip(achieved, results, strict=True)
        ]
        for name, share in shares.items()
    }
    return {"achieved": achieved} | ceilings


def _compute_gain(result: BestResult) -> MeasuredValue:
    """Return the best speed over the median one, unknown for a single trial."""
    if len(result.trials) < 2:
        return UNKNOWN
    return MeasuredValue(result.speed.value / float(result.trials["metric.tokens_per_s"].median()))
