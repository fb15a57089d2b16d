"""Two sweeps beside each other, fairly or not at all."""

from __future__ import annotations

from sweeper.common.errors import UserInputError, suggest
from sweeper.report.best import BestResult, best_results, compared, differences
from sweeper.report.store import Stored


def last(stored: Stored, besides: str) -> str:
    """The sweep of the same workload that began last, of all others."""
    itself = stored.sweeps["run"] == besides
    workloads = set(stored.sweeps.loc[itself, "tag.workload"]) if itself.any() else set[str]()
    others = stored.sweeps[~itself & stored.sweeps["tag.workload"].isin(workloads)] if workloads else stored.sweeps
    if not len(others):
        raise UserInputError(f"--baseline {besides}: there is no other sweep of its workload to hold against it")
    return str(others.sort_values("start")["run"].iloc[-1])


def sweeps(stored: Stored, one: str, other: str, threshold: float) -> tuple[list[str], bool | None]:
    """What may be said of two sweeps, a line for each kind of work; and whether `other` is slower anywhere, by more
    than the threshold and beyond both intervals, or None where nothing compares. Raises UserInputError for an unknown
    name."""
    names = set(stored.sweeps["run"])
    for name in (one, other):
        if name not in names:
            raise UserInputError(f"{name}: there is no such sweep; {suggest(name, names)}")
    mine, theirs = (best_results(stored.trials[stored.trials["tag.sweep"] == name]) for name in (one, other))
    lines, slower = list[str](), list[bool]()
    for peak in mine:
        same = [each for each in theirs if each.work == peak.work and each.speed == peak.speed]
        if not same:
            against = min(theirs, key=lambda each: len(differences(peak.work, each.work)), default=None)
            why = "; ".join(differences(peak.work, against.work)) if against else "it has no complete trial"
            lines.append(f"{_said(peak)}: {other} has nothing to compare with ({why})")
        for each in same:
            a, b = (f"{name} on {_device(p)}" for name, p in ((one, peak), (other, each)))
            before, now = peak.figure.over(peak.devices), each.figure.over(each.devices)
            lines.append(f"{_said(peak)}: {compared(before, now, a, b)}")
            slower.append(now.value < (1 - threshold) * before.value and now.below(before))
    return lines or [f"{one} has no complete trial"], any(slower) if slower else None


def _device(peak: BestResult) -> str:
    return f"{peak.platform}, each" if peak.devices > 1 else peak.device


def _said(peak: BestResult) -> str:
    return " ".join([*peak.work.values(), peak.speed])
