"""Compute the bands around the planner's estimates from left-out runs, grouped by unfamiliarity.

Split-conformal over sources: a run is estimated with efficiencies fitted without its source. Its distance is the number
of properties that runs of other sources lack. All sources weigh the same, since their runs have correlated errors. The
conformal score is the error divided by the trainer's factor and by that of its side, since errors below the estimate
are larger than those above. Neither factor depends on the run's source.
"""

import csv
import math
import random
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.planner_rows import PublishedRun
from sweeper.common.grouping import group_values
from workloads.estimator.estimate import BANDS, BY_NAME, COVERED, Known, bands, narrow_only_near

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
    def deviation_percent(self) -> float:
        """By how much the measured rate, or the measured memory, is above its estimate."""
        return self.error_percent if self.family != "memory" else 100 / (1 + self.error_percent / 100) - 100

    def find_factor(self, factors: Mapping[str, float]) -> float:
        return narrow_only_near(factors.get(self.run.job.trainer, 1.0), self.distance)


def known_of(runs: Iterable[PublishedRun], family: str) -> Known:
    runs, pairs = list(runs), dict[str, int]()
    for run in runs:
        pairs["@".join(run.pair)] = max(run.cluster.gpus, pairs.get("@".join(run.pair), 0))
    tokens = max((run.job.sequence_length for run in runs), default=0)
    parameters = min((round(run.job.model.parameters / 1e6) for run in runs), default=0)
    return Known(tokens, parameters, pairs, of_trainers=family == "memory")


def residuals(scores: Sequence[tuple[PublishedRun, str, float]]) -> list[Residual]:
    """Return the residuals of left-out runs, given as run, family and error in percent."""
    known: dict[tuple[str, str], Known] = {}
    found = []
    for run, family, error in scores:
        key = family, run.source
        if key not in known:
            others = (other for other, kind, _ in scores if kind == family and other.source != run.source)
            known[key] = known_of(others, family)
        distance = len(known[key].missing(run.job, run.cluster))
        found.append(Residual(run, family, error, min(distance, DISTANCES - 1)))
    return found


def trainer_factors(some: Iterable[Residual]) -> dict[str, float]:
    """Return the mean error of each trainer's step times, relative to that of all, with equal weight for each source
    and with one more source that has the mean error of all. Memory has no factors."""
    some = [residual for residual in some if residual.family != "memory"]
    factors, mean_of_all = {}, _mean(some, abs) if some else 1.0
    for name in sorted({residual.run.job.trainer for residual in some}):
        theirs = [residual for residual in some if residual.run.job.trainer == name]
        sources = len({each.run.source for each in theirs})
        factors[name] = (sources * _mean(theirs, abs) / mean_of_all + 1) / (sources + 1)
    return factors


def side_factors(some: Sequence[Residual]) -> tuple[float, float]:
    """Return the typical error of rates below their estimates and of rates above, relative to that of all. It is the
    geometric mean of 1 plus the percent, so that a few large errors do not widen the band of every plan."""
    sides = ([each for each in some if each.deviation_percent * sign > 0] or some for sign in (-1, 1))
    below, above, both = (_mean(each, lambda percent: math.log1p(abs(percent))) for each in (*sides, some))
    return math.expm1(below) / math.expm1(both), math.expm1(above) / math.expm1(both)


def _mean(some: Sequence[Residual], value: Callable[[float], float]) -> float:
    """Return the mean of a function of the deviations, with equal weight for each source."""
    counts = Counter(residual.run.source for residual in some)
    return sum(value(each.deviation_percent) / counts[each.run.source] for each in some) / len(counts)


def band_ends(some: Sequence[Residual]) -> list[tuple[float, float]]:
    """Return how far the bands reach below and above an estimate, in percent of it, at each distance and for a trainer
    with the factor 1. 90% of rates are between both ends, 90% of memory is above the lower and 90% below the upper."""
    if any(each.family == "memory" for each in some):
        sides = (_widths(some, lambda each, sign=sign: max(0.0, sign * each.deviation_percent)) for sign in (-1, 1))
        return [*zip(*sides, strict=True)]
    others = {name: [each for each in some if each.run.source != name] for name in {each.run.source for each in some}}
    factors = {name: (trainer_factors(rest), side_factors(rest)) for name, rest in others.items()}

    def score(each: Residual) -> float:
        trainers, sides = factors[each.run.source]
        return abs(each.deviation_percent) / each.find_factor(trainers) / sides[each.deviation_percent > 0]

    below, above = side_factors(some)
    return [(width * below, width * above) for width in _widths(some, score)]


def _widths(some: Iterable[Residual], score: Callable[[Residual], float]) -> list[float]:
    """Return the score that covers the runs at each distance: never lower than at a smaller distance."""
    by_distance: dict[int, list[Residual]] = defaultdict(list)
    for residual in some:
        by_distance[residual.distance].append(residual)
    widths: list[float] = []
    for distance in range(DISTANCES):
        members = by_distance[distance]
        if len({residual.run.source for residual in members}) < FEW_SOURCES:
            members = [residual for nearer in range(distance + 1) for residual in by_distance[nearer]]
        widths.append(max([_quantile(members, score), *widths]))
    return widths


def _quantile(members: Sequence[Residual], score: Callable[[Residual], float]) -> float:
    """Return the score that covers 90% of sources, with the split-conformal correction for the number of sources."""
    counts = Counter(residual.run.source for residual in members)
    level = min(1.0, COVERED * (1 + 1 / max(1, len(counts))))
    covered, largest = 0.0, 0.0
    for residual in sorted(members, key=score):
        if covered >= level - 1e-9:
            break
        covered += 1 / counts[residual.run.source] / len(counts)
        largest = score(residual)
    return largest


@dataclass(frozen=True)
class Coverage:
    """How well bands fitted to other sources cover a family's runs."""

    share: float  # the mean over sources; of memory, only measurements above the band are not covered
    interval: tuple[float, float]  # the share's 95% interval, with resampled sources
    median_ends: tuple[float, float]  # how far the bands reach below and above the estimate, in percent
    by_source: Mapping[str, float]


def coverage(some: Sequence[Residual]) -> Coverage:
    shares, ends = {}, []
    for source in sorted({residual.run.source for residual in some}):
        theirs = [residual for residual in some if residual.run.source == source]
        others = [residual for residual in some if residual.run.source != source]
        limits, factors = band_ends(others), trainer_factors(others)
        covered = []
        for each in theirs:
            below, above = (end * each.find_factor(factors) for end in limits[each.distance])
            ends.append((below, above))
            is_above_lower = each.family == "memory" or each.deviation_percent >= -below
            covered.append(is_above_lower and each.deviation_percent <= above)
        shares[source] = statistics.fmean(covered)
    draw, values = random.Random(0), list(shares.values())
    means = sorted(statistics.fmean(draw.choices(values, k=len(values))) for _ in range(DRAWS))
    interval = means[round(0.025 * (DRAWS - 1))], means[round(0.975 * (DRAWS - 1))]
    below, above = (statistics.median(some) for some in zip(*ends, strict=True))
    return Coverage(statistics.fmean(values), interval, (below, above), shares)


def describe_errors(some: Iterable[Residual]) -> dict[str, str]:
    """Return the number of runs and the mean size of their errors in percent, by trainer and device."""
    pairs = group_values(("@".join(residual.run.pair), abs(residual.error_percent)) for residual in some)
    return {pair: f"{len(sizes)}:{statistics.fmean(sizes):.1f}" for pair, sizes in sorted(pairs.items())}


def write_bands(found: Sequence[Residual], families: Iterable[str]) -> None:
    with BANDS.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        numbers = ("runs", "sources", "worse", "tokens", "parameters")
        writer.writerow(["family", "distance", "below_percent", "above_percent", *numbers, *BY_NAME])
        for family in families:
            theirs = [residual for residual in found if residual.family == family]
            known = known_of((residual.run for residual in theirs), family)
            sources, worse = {each.run.source for each in theirs}, sum(each.error_percent < 0 for each in theirs)
            counts = (len(theirs), len(sources), worse, known.tokens, known.parameters)
            factors = {name: f"{factor:.2f}" for name, factor in trainer_factors(theirs).items()}
            by_name = [
                " ".join(f"{name}={value}" for name, value in sorted(values.items()))
                for values in (factors, known.pairs, describe_errors(theirs))
            ]
            for distance, ends in enumerate(band_ends(theirs)):
                writer.writerow([family, distance, *map(math.ceil, ends), *counts, *by_name])
    bands.cache_clear()
