"""Compute the bands around the planner's estimates from left-out runs, grouped by unfamiliarity.

Split-conformal over sources: a run is estimated with efficiencies fitted without its source. Its distance is the number
of properties that runs of other sources lack. All sources weigh the same, since their runs have correlated errors. The
conformal score is the error divided by the trainer's factor, which does not depend on the run's source either.
"""

import csv
import math
import random
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks.planner_rows import PublishedRun
from workloads.estimator.estimate import BANDS, COVERED, Known, bands

DISTANCES = 3  # the last distance includes all larger ones
FEW_SOURCES = 3  # a distance with fewer sources also uses the runs at smaller distances
DRAWS = 2000


@dataclass(frozen=True)
class Residual:
    """The error of a left-out run in percent, and how many properties of the run no other source has."""

    run: PublishedRun
    family: str
    error_percent: float
    distance: int

    @property
    def size(self) -> float:
        """The error that a band must cover; for memory, only measurements above the estimate count."""
        if self.family != "memory":
            return abs(self.error_percent)
        return max(0.0, 100 / (1 + self.error_percent / 100) - 100)


def known_of(runs: Iterable[PublishedRun]) -> Known:
    runs = list(runs)
    return Known(
        max((run.cluster.gpus for run in runs), default=0),
        max((run.job.sequence_length for run in runs), default=0),
        min((round(run.job.model.parameters / 1e6) for run in runs), default=0),
        frozenset("@".join(run.pair) for run in runs),
    )


def residuals(scores: Sequence[tuple[PublishedRun, str, float]]) -> list[Residual]:
    """Return the residuals of left-out runs, given as run, family and error in percent."""
    known: dict[tuple[str, str], Known] = {}
    found = []
    for run, family, error in scores:
        key = family, run.source
        if key not in known:
            known[key] = known_of(other for other, kind, _ in scores if kind == family and other.source != run.source)
        distance = len(known[key].missing(run.job, run.cluster))
        found.append(Residual(run, family, error, min(distance, DISTANCES - 1)))
    return found


def trainer_factors(some: Iterable[Residual]) -> dict[str, float]:
    """Return the mean error of each trainer's step times, relative to that of all, with equal weight for each source
    and with one more source that has the mean error of all. Memory has no factors."""
    some = [residual for residual in some if residual.family != "memory"]
    counts = Counter(residual.run.source for residual in some)

    def mean(theirs: Sequence[Residual]) -> float:
        weights = [1 / counts[each.run.source] for each in theirs]
        return sum(each.size * weight for each, weight in zip(theirs, weights, strict=True)) / sum(weights)

    factors = {}
    for name in sorted({residual.run.job.trainer for residual in some}):
        theirs = [residual for residual in some if residual.run.job.trainer == name]
        sources = len({each.run.source for each in theirs})
        factors[name] = (sources * mean(theirs) / mean(some) + 1) / (sources + 1)
    return factors


def _scores(some: Sequence[Residual]) -> list[Residual]:
    """Divide errors by the factors of their trainers, computed without their own sources."""
    others = {name: [each for each in some if each.run.source != name] for name in {each.run.source for each in some}}
    factors = {source: trainer_factors(rest) for source, rest in others.items()}
    return [
        replace(each, error_percent=each.error_percent / factors[each.run.source].get(each.run.job.trainer, 1.0))
        for each in some
    ]


def half_widths(some: Iterable[Residual]) -> list[int]:
    """Return the half width of the band at each distance for a trainer with the factor 1, in whole percent as in the
    planner's table: never narrower than at a smaller distance."""
    by_distance: dict[int, list[Residual]] = defaultdict(list)
    for residual in _scores(list(some)):
        by_distance[residual.distance].append(residual)
    widths: list[int] = []
    for distance in range(DISTANCES):
        members = by_distance[distance]
        if len({residual.run.source for residual in members}) < FEW_SOURCES:
            members = [residual for nearer in range(distance + 1) for residual in by_distance[nearer]]
        widths.append(max([math.ceil(_quantile(members)), *widths]))
    return widths


def _quantile(members: Sequence[Residual]) -> float:
    """Return the error that covers 90% of sources, with the split-conformal correction for the number of sources."""
    counts = Counter(residual.run.source for residual in members)
    level = min(1.0, COVERED * (1 + 1 / max(1, len(counts))))
    covered, size = 0.0, 0.0
    for residual in sorted(members, key=lambda residual: residual.size):
        if covered >= level - 1e-9:
            break
        covered += 1 / counts[residual.run.source] / len(counts)
        size = residual.size
    return size


@dataclass(frozen=True)
class Coverage:
    """How well bands fitted to other sources cover a family's runs."""

    share: float  # the mean over sources
    interval: tuple[float, float]  # the share's 95% interval, with resampled sources
    median_width: float  # half of the band, in percent
    by_source: Mapping[str, float]


def coverage(some: Sequence[Residual]) -> Coverage:
    shares, widths = {}, []
    for source in sorted({residual.run.source for residual in some}):
        theirs = [residual for residual in some if residual.run.source == source]
        others = [residual for residual in some if residual.run.source != source]
        limits, factors = half_widths(others), trainer_factors(others)
        half = [limits[each.distance] * factors.get(each.run.job.trainer, 1.0) for each in theirs]
        widths += half
        shares[source] = statistics.fmean(each.size <= width for each, width in zip(theirs, half, strict=True))
    draw, values = random.Random(0), list(shares.values())
    means = sorted(statistics.fmean(draw.choices(values, k=len(values))) for _ in range(DRAWS))
    interval = means[round(0.025 * (DRAWS - 1))], means[round(0.975 * (DRAWS - 1))]
    return Coverage(statistics.fmean(values), interval, statistics.median(widths), shares)


def write_bands(found: Sequence[Residual], families: Iterable[str]) -> None:
    with BANDS.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        numbers = ("runs", "sources", "low", "gpus", "tokens", "parameters")
        writer.writerow(["family", "distance", "error_percent", *numbers, "factors", "pairs"])
        for family in families:
            theirs = [residual for residual in found if residual.family == family]
            known = known_of(residual.run for residual in theirs)
            sources, low = {each.run.source for each in theirs}, sum(each.error_percent < 0 for each in theirs)
            factors = " ".join(f"{name}={factor:.2f}" for name, factor in trainer_factors(theirs).items())
            for distance, width in enumerate(half_widths(theirs)):
                counts = (len(theirs), len(sources), low, known.gpus, known.tokens, known.parameters)
                writer.writerow([family, distance, width, *counts, factors, " ".join(sorted(known.pairs))])
    bands.cache_clear()
