"""Find unusual steps in a series of times: a drift, a jump, a slow phase, pauses, or a slow source such as a rank.

The tests work on logarithms, so the sizes of anomalies are relative. Trends are fitted to block means after pauses are
removed. Any correlation left between the residuals of successive blocks widens the errors. The limits are strict enough
that clean logs rarely have findings. `benchmarks/diagnose.py` measures how often they do and which faults are found.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from sweeper.metrics.outliers import robust_deviation

FEWEST = 40  # printed steps; fewer do not show a trend
BLOCKS, STEPS_OF_BLOCK = 30, 5  # maximum number of blocks, and minimum number of printed steps per block
ENDS = 3  # minimum number of blocks on each side of a jump
Z_DRIFT, Z_PHASE, Z_SOURCE = 5.0, 7.0, 5.0  # higher for a phase, which is the best of hundreds of intervals
WORTH = 0.015  # the smallest relative change in step time that counts as a finding
WINDOW = 15  # each step is compared with the median of this many printed steps around it
PAUSE = 0.1  # the smallest pause, as a share of a step
PAUSE_SPREADS = 6.0  # the smallest pause, in standard deviations of the other steps
FEWEST_PAUSES = 4
REGULAR = 0.8  # the share of a period's multiples at which a pause must occur
IRREGULAR_SHARE = 0.02  # a smaller share of slow steps without a period is normal


@dataclass(frozen=True)
class Finding:
    """An anomaly in a series of step times."""

    # drift: over the whole series; jump: until the end; phase: slow for a while; pauses: periodic; stalls: irregular
    kind: Literal["drift", "jump", "phase", "pauses", "stalls"]
    share: float  # the slowdown of the steps; for pauses and stalls, their share of total time
    # low, high: the 95% interval of `share`, or NaN
    low: float
    high: float
    # first, last: the steps between which the anomaly occurs
    first: int
    last: int
    period: int = 0  # steps from one pause to the next; 0 without a period
    places: tuple[int, ...] = ()  # the slow steps, as indices into the series


def find_unusual(
    numbers: Sequence[int], times_s: Sequence[float], every: int = 1, resolution: float = 0.0
) -> list[Finding]:
    """Return the anomalies in these steps' times. The caller must have removed the warmup. Each time stands for `every`
    steps, of which a pause lengthens one. `resolution` is the rounding of a time, as a share of the time."""
    if len(times_s) < FEWEST:
        return []
    steps, logs = np.asarray(numbers), np.log(np.asarray(times_s, dtype=float))
    padded = np.pad(logs, WINDOW // 2, mode="reflect")
    usual = np.median(np.lib.stride_tricks.sliding_window_view(padded, WINDOW), axis=1)
    residuals = logs - usual  # far above 0 where a step is slower than its neighbors
    slow = residuals > max(PAUSE_SPREADS * robust_deviation(residuals), math.log1p(max(PAUSE, resolution)))
    findings = [pauses] if (pauses := _find_pauses(steps, np.exp(logs), np.exp(usual), slow, every)) else []
    trend = _find_trend(steps, np.where(slow, usual, logs))
    return [*findings, trend] if trend else findings


def _find_pauses(
    steps: np.ndarray, times_s: np.ndarray, usual_s: np.ndarray, slow: np.ndarray, every: int
) -> Finding | None:
    places = np.flatnonzero(slow)
    if len(places) < FEWEST_PAUSES:
        return None
    period = find_period(steps[places], float(np.median(np.diff(steps))))
    if not period and len(places) < IRREGULAR_SHARE * len(steps) * every:
        return None
    share = float((times_s - usual_s)[slow].sum() / (times_s.sum() + (every - 1) * usual_s.sum()))
    ends = int(steps[places[0]]), int(steps[places[-1]])
    found = tuple(int(place) for place in places)
    return Finding("pauses" if period else "stalls", share, math.nan, math.nan, *ends, period, found)


def find_period(places: np.ndarray, interval: float) -> int:
    """Return the period at which most of these slow steps recur, or 0 if they have no period.

    Nearly every multiple of the period between the first and the last slow step must be slow. Other slow steps may lie
    in between. `interval` is the number of steps from one printed step to the next, which limits the accuracy.
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
    parts = np.array_split(logs, blocks)
    values, sizes = np.array([part.mean() for part in parts]), [len(part) for part in parts]
    place = (np.arange(blocks) + 0.5) / blocks - 0.5  # of each block's middle, from -0.5 to 0.5 over the whole series
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
    first, last = int(steps[0]), int(steps[-1])
    if is_phase:
        edges, fast, slow = np.cumsum([0, *sizes]), values[~inside].mean(), values[inside].mean()
        first = int(steps[_place_edge(logs, edges[begin], sizes[0], fast, slow)])
        last = last if end == blocks else int(steps[_place_edge(logs, edges[end], sizes[0], slow, fast)])
    low, high = (math.expm1(change + sign * 1.96 * error) for sign in (-1, 1))
    return Finding(kind, math.expm1(change), low, high, first, last)


def _place_edge(logs: np.ndarray, near: int, size: int, before: float, after: float) -> int:
    """Return the index of the first step at the level `after` instead of `before`, within `size` steps of `near`."""
    part = logs[near - size : near + size]
    gains = np.cumsum((part - after) ** 2 - (part - before) ** 2)  # from counting a step and those before it as earlier
    return near - size + int(np.argmax([0.0, *gains]))


def best_phase(values: np.ndarray) -> tuple[int, int]:
    """Return the range of slower blocks that explains the most variance. The range may extend to the last block."""
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
    alike = min(0.9, max(0.0, alike + 2 / len(residuals)))  # a short series biases the estimate low
    return max(spread, 1e-9) * math.sqrt((1 + alike) / (1 - alike))


def compare_sources(series: Mapping[str, Mapping[int, float]]) -> dict[str, dict[int, float]]:
    """Return each source's step times over the median of the other sources, for the steps that all have."""
    if len(series) < 2:
        return {}
    common = sorted(set.intersection(*(set(own) for own in series.values())))
    times_s = {name: np.array([own[number] for number in common]) for name, own in series.items()}
    others = {name: np.median([t for other, t in times_s.items() if other != name], axis=0) for name in times_s}
    return {name: dict(zip(common, times_s[name] / others[name], strict=True)) for name in times_s if len(common)}


def find_slow_sources(compared: Mapping[str, Mapping[int, float]]) -> dict[str, Finding]:
    """Return the sources, such as ranks, that take longer per step than the others. See `compare_sources`."""
    found = {}
    for name, ratios in compared.items():
        common = list(ratios)
        if len(common) < 2 * STEPS_OF_BLOCK:
            return {}
        logs = np.log(list(ratios.values()))
        parts = np.array([part.mean() for part in np.array_split(logs, 2 * STEPS_OF_BLOCK)])
        change, error = float(parts.mean()), _residual_error(parts - parts.mean()) / math.sqrt(len(parts))
        if change > math.log1p(WORTH) and change > Z_SOURCE * error:
            low, high = (math.expm1(change + sign * 1.96 * error) for sign in (-1, 1))
            found[name] = Finding("phase", math.expm1(change), low, high, common[0], common[-1])
    return found
