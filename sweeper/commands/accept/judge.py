"""Judge readings: return one verdict for each test on each part, and one for the whole cluster."""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from statistics import median

from sweeper.commands.accept.experiments import EQUAL_CLOCK, Reading, spread_of
from sweeper.commands.doctor.checks import Finding
from sweeper.common.format import count, decimals_apart, format_number, name_some
from sweeper.common.grouping import Value, group_values
from sweeper.metrics.outliers import Limit, limits_among, set_limit

MEDIAN = ", median of the node"  # suffix of tests that report the median result of a node's devices


class Verdict(StrEnum):
    PASS = "pass"
    FAIL = "fail"
    INCONCLUSIVE = "inconclusive"
    MEASURED = "measured"  # there is nothing to compare the result with


@dataclass(frozen=True)
class Judgement:
    """The verdict on one part's result in one test."""

    reading: Reading
    verdict: Verdict
    limit: Limit | None  # the strictest limit; None if there is nothing to compare the result with
    reason: str  # the reason for the verdict, in one line
    cause: str = ""  # the reading that explains a failure, and the remedy; empty if nothing explains it


def judge(
    readings: Sequence[Reading],
    kind: str,
    expected: Mapping[tuple[str, str], float],
    baseline: Mapping[tuple[str, str], float],
) -> list[Judgement]:
    """Return the verdict on every reading. The limits are set for one overall false-alarm rate.

    Args:
        kind: the device kind, cpu or gpu.
        expected: expected rates by test and part, from the hardware catalog or the planner.
        baseline: an accepted run's rates by test and part.
    """
    readings = [*readings, *node_medians(readings), *at_equal_clock(readings)]
    by_test = group_values((reading.test, reading) for reading in readings if not reading.problem)
    keys = [(reading.test, reading.part) for own in by_test.values() for reading in own]
    comparisons = sum(len(own) for own in by_test.values() if len(own) > 1)
    comparisons += sum((key in expected) + (key in baseline) for key in keys)
    limits = defaultdict[tuple[str, str], list[Limit]](list)
    for test, own in by_test.items():
        spread = spread_of(kind, test)
        if test.endswith(MEDIAN):
            spread = spread.of_median(int(str(own[0].beside["devices"])))
        if len(own) > 1:
            among = limits_among([r.value for r in own], ["/".join(r.nodes) for r in own], spread, comparisons)
            for reading, limit in zip(own, among, strict=True):
                limits[test, reading.part].append(limit)
        for basis, rates, deviation in (
            ("the expected rate", expected, math.hypot(spread.total, spread.expected)),
            ("the baseline", baseline, math.sqrt(2) * spread.run),
        ):
            for reading in own:
                if rate := rates.get((test, reading.part)):
                    limit = set_limit(basis, rate, deviation, spread.worth, comparisons)
                    limits[test, reading.part].append(limit)
    return [_judge_reading(reading, limits[reading.test, reading.part]) for reading in readings]


def node_medians(readings: Iterable[Reading]) -> Iterator[Reading]:
    """If several nodes have several devices, yield each node's median device rate, to find generally slow nodes."""
    measured = (reading for reading in readings if reading.scope == "device" and not reading.problem)
    for test, of_test in group_values((reading.test, reading) for reading in measured).items():
        by_node = group_values((reading.nodes, reading) for reading in of_test)
        most = max(len(own) for own in by_node.values())
        for nodes, own in by_node.items():
            if len(by_node) > 1 and len(own) == most > 1:
                middle, beside = median(reading.value for reading in own), {"devices": most}
                yield Reading(f"{test}{MEDIAN}", "node", nodes[0], nodes, own[0].unit, middle, beside=beside)


def at_equal_clock(readings: Iterable[Reading]) -> Iterator[Reading]:
    """Yield sustained GEMM rates scaled to the median clock, because clocks vary by chip. Skip tests without clocks."""
    # A burst is too short for more than a few clock readings.
    gemms = (r for r in readings if r.unit == "TFLOP/s" and r.test.endswith("sustained") and not r.problem)
    for test, own in group_values((reading.test, reading) for reading in gemms).items():
        clocks_mhz = [float(reading.beside.get("sm_clock_mhz") or 0.0) for reading in own]
        if len(own) > 1 and all(clocks_mhz):
            for reading, clock_mhz in zip(own, clocks_mhz, strict=True):
                at_median = median(clocks_mhz) / clock_mhz
                values = {name: at_median * getattr(reading, name) for name in ("value", "low", "high")}
                yield replace(reading, test=f"{test}{EQUAL_CLOCK}", **values)


def _judge_reading(reading: Reading, limits: Sequence[Limit]) -> Judgement:
    if reading.problem:
        return Judgement(reading, Verdict.INCONCLUSIVE, None, f"not measured: {reading.problem}")
    if not limits:
        return Judgement(reading, Verdict.MEASURED, None, "nothing to compare it with: set baseline=ACCEPT.json")
    limit = max(limits, key=lambda limit: limit.lowest)
    shares = 100 * reading.value / limit.expected, 100 * limit.lowest / limit.expected
    decimals = decimals_apart(*shares, 1)
    reached, least = (f"{share:.{decimals}f}%" for share in shares)
    share = f"{reached} of {limit.basis}, passes from {least}"
    if reading.value >= limit.lowest:
        return Judgement(reading, Verdict.PASS, limit, share)
    if reading.high >= limit.lowest:
        return Judgement(reading, Verdict.INCONCLUSIVE, limit, f"{share}; its 95% interval includes this limit")
    return Judgement(reading, Verdict.FAIL, limit, share)


def overall_verdict(judgements: Iterable[Judgement], findings: Iterable[Finding]) -> Verdict:
    """Return the verdict on the whole cluster. The cluster fails if a test fails or `doctor` finds a problem with a
    GPU. The verdict is inconclusive if a test is inconclusive, another process uses a GPU, a problem with a node
    affects results, or no result could be compared."""
    verdicts = {judgement.verdict for judgement in judgements}
    verdicts |= {finding_verdict(f.location, f.by_others) for f in findings if f.affects_results}
    if Verdict.FAIL in verdicts:
        return Verdict.FAIL
    is_open = Verdict.INCONCLUSIVE in verdicts or Verdict.PASS not in verdicts
    return Verdict.INCONCLUSIVE if is_open else Verdict.PASS


def finding_verdict(location: str, by_others: bool) -> Verdict:
    """Return the verdict for a finding that affects results: fail for a GPU that other processes do not use."""
    return Verdict.FAIL if " GPU " in location and not by_others else Verdict.INCONCLUSIVE


def describe(verdict: Verdict, judgements: Sequence[Judgement], findings: Sequence[Finding]) -> str:
    """Describe the overall verdict in one sentence that starts with the verdict."""
    tests, parts = len({j.reading.test for j in judgements}), len({j.reading.part for j in judgements})
    slow, undecided = (list_parts(judgements, kind) for kind in (Verdict.FAIL, Verdict.INCONCLUSIVE))
    is_first = verdict is Verdict.INCONCLUSIVE and not undecided
    measured = list_parts(judgements, Verdict.MEASURED) if is_first else []
    problems = [finding.location for finding in findings if finding.affects_results and not finding.by_others]
    others = [f"{f.location}: {f.problem}" for f in findings if f.by_others and verdict is not Verdict.PASS]
    advice = "" if others else ": set baseline= to this accept.json in the next run"
    states = [(slow, "too slow"), (problems, "with problems"), (undecided, "without a verdict")]
    states.append((measured, f"measured, with nothing to compare{advice}"))
    reasons = [f"{name_some(names)} {state}" for names, state in states if names]
    reasons += [f"{name_some(others, 2)}; end other processes and rerun"] if others else []
    text = "; ".join(reasons) or ("nothing is too slow" if tests else "nothing was measured")
    return f"{verdict.value.upper()}: {text} ({count(tests, 'test')} of {count(parts, 'part')} in all)"


def list_problems(judgements: Sequence[Judgement], findings: Sequence[Finding]) -> list[str]:
    """Return one entry per problem, failures first. Tests and parts with the same reason and cause share an entry."""
    entries = [("!" if f.affects_results else "-", f"{f.location}: {f.problem}\n  {f.remedy}") for f in findings]
    for sign, verdict in (("!", Verdict.FAIL), ("-", Verdict.INCONCLUSIVE)):
        rows = [(j.reading.part, j.reading.test, _explain(j)) for j in judgements if j.verdict is verdict]
        entries += [(sign, f"{name_some(parts)}: {name_some(tests)}:{why}") for parts, tests, why in merge_equal(rows)]
    return [f"{sign} {text}" for sign, text in sorted(entries, key=lambda entry: entry[0])]  # "!" sorts before "-"


def _explain(judgement: Judgement) -> str:
    reading = judgement.reading
    value = "" if reading.problem else f" {format_number(reading.value)} {reading.unit},"
    return f"{value} {judgement.reason}" + (f"\n  {judgement.cause}" if judgement.cause else "")


def list_parts(judgements: Iterable[Judgement], verdict: Verdict) -> list[str]:
    """Return the parts that have this verdict in any test, in the order of the tests."""
    return list(dict.fromkeys(j.reading.part for j in judgements if j.verdict is verdict))


def merge_equal(rows: Iterable[tuple[str, str, Value]]) -> Iterator[tuple[Sequence[str], Sequence[str], Value]]:
    """Merge rows of a part, a test and a text: the tests of a part with equal texts, then parts with equal tests."""
    tests_of = group_values(((part, text), test) for part, test, text in rows)
    parts_of = group_values(((tuple(tests), text), part) for (part, text), tests in tests_of.items())
    yield from ((parts, tests, text) for (tests, text), parts in parts_of.items())
