"""Find unusual steps in a series of times: a drift, a jump, a slow phase, pauses, or a source slower than others.

The tests use logarithms, so that sizes are relative. Trends are fitted to the means of blocks without pauses. The
remaining correlation between the residuals of successive blocks widens the errors. The limits are chosen so that clean
logs rarely have a finding; `benchmarks/diagnose.py` measures how rarely, and which faults are found.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from sweeper.metrics.outliers import robust_deviation

FEWEST = 40  # printed steps; fewer do not show a trend
BLOCKS, STEPS_OF_BLOCK = 30, 5  # the most blocks, and the fewest printed steps in each
ENDS = 3  # the fewest blocks on each side of a jump
Z_DRIFT, Z_PHASE, Z_SOURCE = 5.0, 7.0, 5.0  # a phase is the best of hundreds of intervals
WORTH = 0.015  # the smallest change of step times that is a finding
WINDOW = 15  # a step is compared with the median of this many printed steps around it
PAUSE = 0.1  # the smallest share of a step that counts as a pause
PAUSE_SPREADS = 6.0  # a pause also exceeds this many standard deviations of the other steps
FEWEST_PAUSES = 4
REGULAR = 0.8  # the share of a period's multiples that must have a pause
IRREGULAR_SHARE = 0.02  # of the steps: fewer slow ones without a period are normal


@dataclass(frozen=True)
class Finding:
    """Something unusual in a series."""

    # drift: over the whole series; jump: until its end; phase: slow for a while; pauses: periodic; stalls: irregular
    kind: Literal["drift", "jump", "phase", "pauses", "stalls"]
    share: float  # by how much steps are slower; for pauses and stalls, their share of the whole time
    # low, high: its 95% interval, NaN without one
    low: float
    high: float
    # first, last: the steps between which it occurs
    first: int
    last: int
    period: int = 0  # steps between two pauses; 0 without a period
    places: tuple[int, ...] = ()  # the printed steps that are slow, as indices of the series


def find_unusual(numbers: Sequence[int], times_s: Sequence[float]) -> list[Finding]:
    """Return the findings in the times of steps with these numbers, from which the warmup has been removed."""
    if len(times_s) < FEWEST:
        return []
    steps, logs = np.asarray(numbers), np.log(np.asarray(times_s, dtype=float))
    padded = np.pad(logs, WINDOW // 2, mode="reflect")
    usual = np.median(np.lib.stride_tricks.sliding_window_view(padded, WINDOW), axis=1)
    residuals = logs - usual  # far above 0 if a step is slower than its neighbors
    slow = residuals > max(PAUSE_SPREADS * robust_deviation(residuals), math.log1p(PAUSE))
    findings = [pauses] if (pauses := _find_pauses(steps, np.exp(logs), np.exp(usual), slow)) else []
    trend = _find_trend(steps, np.where(slow, usual, logs))
    return [*findings, trend] if trend else findings


def _find_pauses(steps: np.ndarray, times_s: np.ndarray, usual_s: np.ndarray, slow: np.ndarray) -> Finding | None:
    places = np.flatnonzero(slow)
    if len(places) < FEWEST_PAUSES:
        return None
    period = find_period(steps[places], float(np.median(np.diff(steps))))
    if not period and len(places) < IRREGULAR_SHARE * len(steps):
        return None
    share = float((times_s - usual_s)[slow].sum() / times_s.sum())
    ends = int(steps[places[0]]), int(steps[places[-1]])
    found = tuple(int(place) for place in places)
    return Finding("pauses" if period else "stalls", share, math.nan, math.nan, *ends, period, found)


def find_period(places: np.ndarray, interval: float) -> int:
    """Return the period of most of these slow steps, as far as steps are printed; 0 if they have none.

    Between the first and the last one, nearly every multiple of the period must be slow; other slow steps may lie in
    between. `interval` is the number of steps from one printed step to the next.
    """
    best, period, fewest = 0, 0, FEWEST_PAUSES if interval <= 1 else FEWEST_PAUSES + 2
    for gap in sorted(set(np.diff(places)) | set(places[2:] - places[:-2])):
        for anchor in places if gap >= 2 * interval * (1 + (interval > 1)) else ():
            cycles = np.round((places - anchor) / gap)
            hits = np.abs(places - anchor - cycles * gap) <= interval * (interval > 1)
            found = set(cycles[hits])
            covered = len(found) >= REGULAR * (max(found) - min(found) + 1)
            if covered and len(found) > best and len(found) >= max(fewest, len(places) / 2):
                best, period = len(found), int(gap)
    return period


def _find_trend(steps: np.ndarray, logs: np.ndarray) -> Finding | None:
    blocks = min(BLOCKS, len(logs) // STEPS_OF_BLOCK)
    values = np.array([part.mean() for part in np.array_split(logs, blocks)])
    bounds = [int(part[0]) for part in np.array_split(steps, blocks)] + [int(steps[-1])]
    place = np.linspace(-0.5, 0.5, blocks)
    slope = float(place @ values / (place @ place))
    line = values.mean() + slope * place
    begin, end = best_phase(values)
    inside = (np.arange(blocks) >= begin) & (np.arange(blocks) < end)
    level = np.where(inside, values[inside].mean(), values[~inside].mean())
    is_phase = ((values - level) ** 2).sum() < ((values - line) ** 2).sum()
    change = float(values[inside].mean() - values[~inside].mean()) if is_phase else slope
    scale = math.sqrt(1 / inside.sum() + 1 / (~inside).sum()) if is_phase else 1 / math.sqrt(place @ place)
    error = scale * _residual_error(values - (level if is_phase else line))
    if change < math.log1p(WORTH) or change < (Z_PHASE if is_phase else Z_DRIFT) * error:
        return None
    kind: Literal["drift", "jump", "phase"] = "drift" if not is_phase else "jump" if end == blocks else "phase"
    ends = (bounds[begin], bounds[end]) if is_phase else (bounds[0], bounds[-1])
    low, high = (math.expm1(change + sign * 1.96 * error) for sign in (-1, 1))
    return Finding(kind, math.expm1(change), low, high, *ends)


def best_phase(values: np.ndarray) -> tuple[int, int]:
    """Return the interval of blocks whose higher level explains the most variance. It may last until the end."""
    count, sums = len(values), np.concatenate([[0.0], np.cumsum(values - values.mean())])
    best, found = -1.0, (ENDS, count)
    for begin in range(ENDS, count - ENDS + 1):
        for end in (*range(begin + ENDS, count - ENDS + 1), count):
            size = end - begin
            gain = (sums[end] - sums[begin]) ** 2 / size / (1 - size / count)
            if sums[end] > sums[begin] and gain > best:
                best, found = gain, (begin, end)
    return found


def _residual_error(residuals: np.ndarray) -> float:
    spread = math.sqrt(float(residuals @ residuals) / (len(residuals) - 3))
    alike = float(residuals[1:] @ residuals[:-1] / (residuals @ residuals)) if spread > 0 else 0.0
    alike = min(0.9, max(0.0, alike + 2 / len(residuals)))  # the estimate is too low in a short series
    return max(spread, 1e-9) * math.sqrt((1 + alike) / (1 - alike))


def find_slow_sources(series: Mapping[str, Mapping[int, float]]) -> dict[str, Finding]:
    """Return the sources, such as ranks, that take longer for a step than the median of the others.

    `series` has the seconds of each source, by step number.
    """
    common = sorted(set.intersection(*(set(own) for own in series.values()))) if len(series) > 1 else []
    if len(common) < 2 * STEPS_OF_BLOCK:
        return {}
    logs = {name: np.log([own[number] for number in common]) for name, own in series.items()}
    found = {}
    for name, own in logs.items():
        others = np.median([values for other, values in logs.items() if other != name], axis=0)
        parts = np.array([part.mean() for part in np.array_split(own - others, 2 * STEPS_OF_BLOCK)])
        change, error = float(parts.mean()), _residual_error(parts - parts.mean()) / math.sqrt(len(parts))
        if change > math.log1p(WORTH) and change > Z_SOURCE * error:
            low, high = (math.expm1(change + sign * 1.96 * error) for sign in (-1, 1))
            found[name] = Finding("phase", math.expm1(change), low, high, common[0], common[-1])
    return found
