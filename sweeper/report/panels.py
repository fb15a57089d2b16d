"""Training on several platforms in nine panels, as numbers: what to draw of it, however it is drawn.

A platform is a kind of device and how many of them. All panels are of one kind of work, so that every axis compares.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from sweeper.report.best import SPEEDS, BestResult, Figure, figure_of

# The colour-blind can tell them apart (Okabe and Ito 2008).
COLOURS = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000"]
MAKERS = re.compile(r"\b(NVIDIA|AMD Instinct|AMD) ")
UNKNOWN = Figure(math.nan)
NOTE = (
    "Bars are the best configuration of each platform, lines on them its 95% interval. Reached is the rate that a "
    "search of matrix products had on such a GPU; peak is the vendor's dense one."
)


@dataclass(frozen=True)
class Panel:
    """Bars in `series`, by name, one for each platform; or in `spread` all values of each."""

    title: str
    unit: str
    series: dict[str, list[Figure]] = field(default_factory=dict)
    spread: list[list[float]] = field(default_factory=list)

    @property
    def shown(self) -> dict[str, list[Figure]]:
        """The series that have a figure."""
        return {name: own for name, own in self.series.items() if not all(math.isnan(f.value) for f in own)}

    @property
    def empty(self) -> bool:
        return not self.shown and not any(self.spread)


def names(found: Sequence[BestResult]) -> list[str]:
    """What the platforms are called where there is little room."""
    return [MAKERS.sub("", peak.platform) for peak in found]


def colours(found: Sequence[BestResult]) -> list[str]:
    """One for each device, however many of them."""
    devices = list(dict.fromkeys(peak.device for peak in found))
    return [COLOURS[devices.index(peak.device) % len(COLOURS)] for peak in found]


def panels(found: Sequence[BestResult]) -> list[Panel]:
    """The nine, of peaks of one kind of work that is judged by tokens/s; of other work its speed alone."""
    if found[0].speed != "tokens_per_s":
        return [Panel("", SPEEDS[found[0].speed], {"": [peak.figure for peak in found]})]
    each = [_per_gpu(peak, "tokens_per_s") for peak in found]
    spread = [list(peak.trials["metric.tokens_per_s"] / peak.devices) for peak in found]
    return [
        Panel("Tokens", "tokens/s", {"": [peak.figure for peak in found]}),
        Panel("Computation", "TFLOP/s", {"": [figure_of(peak.trial, "tflops") for peak in found]}),
        Panel("Utilisation of the peak", "%", {name.upper(): _percent(found, name) for name in ("mfu", "hfu")}),
        Panel("Tokens per GPU", "tokens/s per GPU", {"": each}),
        Panel("Computation per GPU", "TFLOP/s per GPU", {"": [_per_gpu(peak, "tflops") for peak in found]}),
        Panel("Achieved and possible", "TFLOP/s per GPU", _ceilings(found)),
        Panel("Step", "ms", {"": [Figure(peak.metric("step_time_ms")) for peak in found]}),
        Panel("All configurations", "tokens/s per GPU", spread=spread),
        Panel("Best over median configuration", "times", {"": [_gain(peak) for peak in found]}),
    ]


def _per_gpu(peak: BestResult, name: str) -> Figure:
    return figure_of(peak.trial, name).over(peak.devices)


def _percent(found: Sequence[BestResult], name: str) -> list[Figure]:
    return [Figure(100 * peak.metric(name)) for peak in found]


def _ceilings(found: Sequence[BestResult]) -> dict[str, list[Figure]]:
    """What was achieved, and the rates that the shares of it are of."""
    achieved = [_per_gpu(peak, "tflops") for peak in found]
    shares = {"reached": "mamf_utilization", "peak": "mfu"}
    return {"achieved": achieved} | {
        name: [Figure(a.value / (peak.metric(share) or math.nan)) for a, peak in zip(achieved, found, strict=True)]
        for name, share in shares.items()
    }


def _gain(peak: BestResult) -> Figure:
    """What was gained by trying, where anything was tried."""
    return (
        Figure(peak.figure.value / float(peak.trials["metric.tokens_per_s"].median()))
        if len(peak.trials) > 1
        else UNKNOWN
    )
