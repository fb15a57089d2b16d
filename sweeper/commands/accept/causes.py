"""Infer the likely cause of a failed test from readings taken during the test, or report the cause as unknown."""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from sweeper.commands.accept.experiments import END_OVER_START, EQUAL_CLOCK
from sweeper.commands.accept.judge import Judgement, Verdict
from sweeper.commands.doctor.checks import Finding, check_gpu, check_load, check_node, remedies_of
from sweeper.common.grouping import group_values
from sweeper.common.trials import TrialStatus
from workloads.api.gpus import TAINTING_SLOWDOWNS

UNKNOWN = "unknown: nothing that was read explains it"
LOWER_CLOCK = 0.97  # a clock below this fraction of the other parts' median clock explains a slow result
AT_LIMIT = 0.97  # a GPU that draws more than this fraction of its power limit is throttled by the limit
SAVING_GOVERNORS = {"powersave", "conservative"}
DRIFTS = (("sm_clock", "mhz"), ("temperature", "c"), ("power", "w"))
ALL_LINKS = 2 / 3  # if at least this fraction of a node's links fail, the node itself is at fault


@dataclass(frozen=True)
class Evidence:
    """Readings taken during a failed test: from the part that failed, its nodes and GPUs, and the other parts."""

    judgement: Judgement
    states: Mapping[str, Mapping[str, Any]]  # the states of the part's nodes by node name
    gpus: Sequence[Mapping[str, Any]]  # the part's GPUs
    others: Sequence[Mapping[str, Any]]  # device readings taken while the other parts ran this test
    slow_links: Mapping[str, float]  # by node: the fraction of link partners with a failed or inconclusive test


def add_causes(judgements: Sequence[Judgement], states: Mapping[str, Mapping[str, Any]]) -> list[Judgement]:
    """Add likely causes to failed and inconclusive judgements. `states` maps node names to node states.

    A failure is inconclusive if other processes use the part and no reading shows a problem of its own.
    """
    slow_partners, partners = defaultdict[str, set[str]](set), defaultdict[str, set[str]](set)
    beside = group_values((judgement.reading.test, judgement.reading.beside) for judgement in judgements)
    for judgement in judgements:
        for node in judgement.reading.nodes if judgement.reading.scope == "link" else ():
            others = {*judgement.reading.nodes} - {node}
            partners[node] |= others
            slow_partners[node] |= others if is_explained(judgement) else set()
    slow_links = {node: len(slow_partners[node]) / len(met) for node, met in partners.items()}
    read = {judgement.reading.part: judgement.reading.beside for judgement in judgements}
    uuids = {part: f"GPU-{values['gpu_uuid']}" for part, values in read.items() if "gpu_uuid" in values}

    def explain(judgement: Judgement) -> Judgement:
        reading = judgement.reading
        of_nodes = {name: states[name] for name in reading.nodes if name in states}
        numbers = {int(number) for number in re.findall(r"\d+", reading.part.partition(" GPU ")[2])}
        all_gpus = [gpu for state in of_nodes.values() for gpu in state["gpus"]]
        tested = {uuids.get(f"{reading.place} GPU {number}") for number in numbers} - {None}
        gpus = [gpu for gpu in all_gpus if gpu.get("uuid") in tested]  # ranks number only the visible GPUs
        gpus = gpus or [gpu for gpu in all_gpus if not numbers or gpu["number"] in numbers]
        others = [one for one in beside[reading.test] if one is not reading.beside]
        evidence = Evidence(judgement, of_nodes, gpus, others, slow_links)
        if judgement.verdict is Verdict.FAIL:
            disturbances, has_problem = find_disturbances(evidence)
            if disturbances and not has_problem:
                reason = f"{judgement.reason}; not judged, because other processes used the part"
                return replace(judgement, verdict=Verdict.INCONCLUSIVE, reason=reason, cause="; ".join(disturbances))
        unknown = UNKNOWN if judgement.verdict is Verdict.FAIL else ""
        rules = RULES if is_explained(judgement) else (_host,)  # for a test that did not run, for lack of time
        causes = "; ".join(dict.fromkeys(cause for rule in rules for cause in rule(evidence)))
        return replace(judgement, cause=causes or unknown)

    return [explain(j) if j.verdict in (Verdict.FAIL, Verdict.INCONCLUSIVE) else j for j in judgements]


def is_explained(judgement: Judgement) -> bool:
    """Return whether the test failed, or ran and was inconclusive."""
    was_run = not judgement.reading.problem.startswith(TrialStatus.CANCELLED)
    return judgement.verdict is Verdict.FAIL or (judgement.verdict is Verdict.INCONCLUSIVE and was_run)


def find_disturbances(evidence: Evidence) -> tuple[list[str], bool]:
    """Return the other processes on the part, and whether a reading shows a problem of the part itself. A lower clock
    is not one, because other processes lower it."""
    found = [*_check_part(evidence), *(one for state in evidence.states.items() for one in check_load(*state))]
    own = [one for one in found if not one.by_others and (one.affects_results or "GPU " in one.location)]
    has_governor = any(state.get("governor") in SAVING_GOVERNORS for state in evidence.states.values())
    return [_write(one) for one in found if one.by_others], bool(own or has_governor or [*_slowdowns(evidence)])


def _check_part(evidence: Evidence) -> list[Finding]:
    found = [one for gpu in evidence.gpus for one in check_gpu(f"GPU {gpu['number']}", gpu)]
    return found + [
        one for state in evidence.states.items() for one in check_node(*state) if "GPU " not in one.location
    ]


def _write(finding: Finding) -> str:
    return f"{finding.location}: {finding.problem} ({finding.remedy})"


def _settings(evidence: Evidence) -> Iterator[str]:
    yield from map(_write, _check_part(evidence))


def _slowdowns(evidence: Evidence) -> Iterator[str]:
    beside = evidence.judgement.reading.beside
    if reasons := sorted(set(str(beside.get("slowed_by", "")).split()) & TAINTING_SLOWDOWNS):
        yield f"slowed by {' and '.join(reasons)} at {beside.get('temperature_c', '?')} °C: check cooling and power"


def _clock(evidence: Evidence) -> Iterator[str]:
    if evidence.judgement.reading.test.endswith(EQUAL_CLOCK):
        return
    beside = evidence.judgement.reading.beside
    clock, *others = (_number(one, "sm_clock_mhz") for one in (beside, *evidence.others))
    if clock and any(others) and clock < LOWER_CLOCK * (usual := median(filter(None, others))):
        power_w, limit_w = _number(beside, "power_w"), _number(beside, "power_limit_w")
        is_limited = limit_w and power_w > AT_LIMIT * limit_w
        power = f"at its limit of {limit_w:.0f} W" if is_limited else f"at {power_w:.0f} W"
        heat = f"at {beside['temperature_c']} °C" if "temperature_c" in beside else ""
        read = [f"its clock is {clock:.0f} MHz", f"the others' {usual:.0f}", power if power_w else "", heat]
        remedy = remedies_of(str(evidence.gpus[0]["vendor"]) if evidence.gpus else "")["slow"]
        yield f"{', '.join(filter(None, read))} ({remedy})"


def _drift(evidence: Evidence) -> Iterator[str]:
    beside = evidence.judgement.reading.beside
    fall, hotter, watts = (_number(beside, f"{name}_drift_{unit}") for name, unit in DRIFTS)
    if evidence.judgement.reading.test.endswith(END_OVER_START) and fall < 0:
        others = f"its temperature changed by {hotter:+.0f} °C and its power by {watts:+.0f} W"
        yield f"its clock fell by {-fall:.0f} MHz, while {others}: check cooling and power"


def _number(beside: Mapping[str, Any], name: str) -> float:
    return float(beside.get(name) or 0.0)


def _host(evidence: Evidence) -> Iterator[str]:
    for name, state in evidence.states.items():
        yield from map(_write, check_load(name, state))
        if (governor := state.get("governor")) in SAVING_GOVERNORS:
            yield f"{name}: the frequency governor is {governor} (cpupower frequency-set -g performance, as root)"


def _links(evidence: Evidence) -> Iterator[str]:
    if evidence.judgement.reading.scope != "link":
        return
    slow = [node for node in evidence.judgement.reading.nodes if evidence.slow_links[node] >= ALL_LINKS]
    if len(slow) == 1:
        yield f"{slow[0]} is slow with most of its partners: its NICs or their switch port, not this link"
    elif not slow:
        yield "both nodes are as fast as others with other partners: the path between them"
    for node, state in evidence.states.items():
        yield from (f"{node}: {name} rose by {rise} during the test" for name, rise in state.get("risen", {}).items())
    networks = [state["networks"] for state in evidence.states.values()]
    for name in sorted(set().union(*networks)):
        values = [network.get(name, "absent") for network in networks]
        if len(set(values)) > 1:
            yield f"{name} differs: {' and '.join(values)}"


RULES = (_links, _settings, _slowdowns, _clock, _drift, _host)  # rules about the failed part itself come first
