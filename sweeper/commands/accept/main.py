"""Accept a cluster: is it as fast as it should be, and which part is not?

    python -m sweeper accept
    python -m sweeper accept cluster.address=auto profile=standard dir=/data/accept
    python -m sweeper accept baseline=acceptance/h100-20261120-101500/accept.json

Measures every device alone and all of them at once (products burst and sustained, memory, copies to and from the host),
then each node (collectives by size, a training step), pairs of nodes in rounds, and the whole. Each result is compared
with the other parts, with the catalogue's and the planner's expected rate, and with the baseline, if one is given. At
most 1% of healthy clusters fail, all comparisons together. quick ends within five minutes, standard within half an
hour; burn_in loads each GPU for minutes.

Writes accept.json, a page (HTML), Markdown and JUnit XML to DIR/acceptance/HARDWARE-DATE. verify says whether an
accept.json is as it was written; compare prints what has become slower from one run to a later one. The exit code is 0
if everything passes, 1 if a part fails, 3 if there is no verdict on some part. Nothing is changed on the machines, and
no root is needed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from sweeper.cli.command import Cluster, Subcommand, word
from sweeper.cli.exits import COMPLETE, INTERRUPTED, SOME_FAILED
from sweeper.commands.accept.expected import expected_rates
from sweeper.commands.accept.experiments import Profile, Reading, read_experiments
from sweeper.commands.accept.judge import Judgement, Verdict, describe, judge, overall_verdict
from sweeper.commands.accept.page import build_html, build_junit, build_markdown
from sweeper.commands.accept.record import (
    build_record,
    compare_records,
    is_unchanged,
    read_baseline,
    read_record,
    write_record,
)
from sweeper.commands.doctor.checks import Finding, check_gpu_setup, check_nodes
from sweeper.common.format import count, format_number
from sweeper.config.hardware import Node
from sweeper.execution import ray_environment
from sweeper.preflight.devices import describe_inventory

LONGEST_S = {"quick": 285.0, "standard": 1800.0, "burn_in": 7200.0}  # of all experiments
NO_VERDICT = 3  # exit code
CODES = {Verdict.PASS: COMPLETE, Verdict.FAIL: SOME_FAILED, Verdict.INCONCLUSIVE: NO_VERDICT}
FOLDER = "acceptance"
PAGES = {"accept.html": build_html, "accept.md": build_markdown, "accept.xml": build_junit}


@dataclass(frozen=True, kw_only=True)
class AcceptRequest:
    """What to accept.

    Attributes:
        hardware: a kind of GPU that is here, or cpu.
        profile: how long it takes.
        baseline: the accept.json of an earlier run that passed, whose parts are compared with these.
        dir: results directory.
    """

    hardware: str = "auto"
    profile: Profile = "quick"
    baseline: str | None = None
    dir: str = "."
    cluster: Cluster = field(default_factory=Cluster)


@dataclass(frozen=True, kw_only=True)
class VerifyRequest:
    """The accept.json to check, or its folder."""

    file: str = word("FILE")


@dataclass(frozen=True, kw_only=True)
class CompareRequest:
    """Two runs on the same machines, the earlier one first."""

    first: str = word("BEFORE")
    second: str = word("AFTER")


def accept(request: AcceptRequest) -> int:
    """Measure, judge, print and write accept.json. Returns the exit code."""
    started_s = time.monotonic()
    address, insecure = request.cluster.address, request.cluster.insecure
    ray_environment.prepare(address, insecure)  # before Ray is imported
    from sweeper.commands.accept import measure
    from sweeper.commands.doctor.exercise import read_node_state
    from sweeper.execution import cluster

    console = Console(highlight=False, soft_wrap=True, markup=False)
    target, nodes = cluster.find_target(request.hardware, address, insecure)
    baseline = read_baseline(Path(request.baseline).expanduser(), target) if request.baseline else {}
    read = [read_node_state(node, request.dir) for node in nodes]
    findings = [*check_gpu_setup(nodes), *check_nodes(read)]
    states = dict(zip(name_nodes(nodes, read), read, strict=True))
    console.print(f"accept     {describe_inventory(target.nodes)}, profile {request.profile}")
    names = [name for name, node in zip(states, nodes, strict=True) if node in target.nodes]
    phases = measure.plan_phases(target, names, read_experiments(target.hardware.kind, request.profile))
    deadline_s = started_s + LONGEST_S[request.profile]
    readings, expected, interrupted = list[Reading](), dict[tuple[str, str], float](), False
    try:
        cluster.start(target, has_variables=False)
        for job, experiment, result in measure.run_phases(phases, deadline_s):
            new = list(measure.read_result(job, experiment, result))
            rates = expected_rates(job.target, experiment, job.ranks)
            expected |= {(reading.test, reading.part): rates[reading.test] for reading in new if reading.test in rates}
            readings += new
            for line in summarize(job.title, new):
                console.print(f"{time.monotonic() - started_s:5.0f} s    {line}")
    except KeyboardInterrupt:
        interrupted = True
        console.print("interrupted: the verdict is on what was measured until now")
    finally:
        cluster.stop()
    judgements = judge(readings, target.hardware.kind, expected, baseline)
    verdict = overall_verdict(judgements, findings)
    sentence = describe(verdict, judgements, findings)
    record = build_record(target, request.profile, sentence, judgements, findings, states)
    folder = Path(request.dir).expanduser() / FOLDER / f"{target.hardware.name}-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    folder.mkdir(parents=True)
    write_record(folder / "accept.json", record)
    for name, build in PAGES.items():
        (folder / name).write_text(build(record))
    for line in (
        *list_problems(judgements, findings),
        sentence,
        f"written    {folder}: accept.json, {', '.join(PAGES)}",
    ):
        console.print(line)
    return INTERRUPTED if interrupted else CODES[verdict]


def name_nodes(nodes: Sequence[Node], states: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the nodes' names: their hosts', or their addresses with Ray's ids where several share a host."""
    hosts = [str(state["node"]) for state in states]
    return hosts if len(set(hosts)) == len(hosts) else [node.label for node in nodes]


def summarize(title: str, readings: Sequence[Reading]) -> Iterator[str]:
    """Yield a line for each test of a result: the slowest and the fastest part, or why there is none."""
    for test in dict.fromkeys(reading.test for reading in readings):
        own = [reading for reading in readings if reading.test == test]
        if problems := [reading.problem for reading in own if reading.problem]:
            yield f"{title}: {test}: {problems[0]}"
            continue
        ends = sorted({reading.value for reading in own})[:: max(1, len(own) - 1)]
        yield f"{title}: {test}: {' to '.join(map(format_number, ends))} {own[0].unit}"


def list_problems(judgements: Sequence[Judgement], findings: Sequence[Finding]) -> Iterator[str]:
    """Yield the findings, then what failed, then what is open, each with its reason and likely cause."""
    for finding in findings:
        yield f"{'!' if finding.affects_results else '-'} {finding.location}: {finding.problem}\n  {finding.remedy}"
    for sign, verdict in (("!", Verdict.FAIL), ("-", Verdict.INCONCLUSIVE)):
        for judgement in judgements:
            if judgement.verdict is verdict:
                reading = judgement.reading
                value = "" if reading.problem else f" {format_number(reading.value)} {reading.unit},"
                cause = f"\n  {judgement.cause}" if judgement.cause else ""
                yield f"{sign} {reading.part}: {reading.test}:{value} {judgement.reason}{cause}"


def verify(request: VerifyRequest) -> int:
    """Print whether an accept.json is as it was written. Returns the exit code."""
    record = read_record(Path(request.file))
    unchanged = is_unchanged(record)
    print(f"{'unchanged' if unchanged else 'CHANGED'}: {request.file}, {record['date']}: {record['sentence']}")
    return COMPLETE if unchanged else SOME_FAILED


def compare(request: CompareRequest) -> int:
    """Print what has become slower between two runs. Returns the exit code: 1 if anything has."""
    before, after = (read_record(Path(file)) for file in (request.first, request.second))
    changes = compare_records(before, after)
    slower = [change for change in changes if change.is_slower]
    for change in slower:
        print(f"! {change}")
    for test in dict.fromkeys(change.test for change in changes):
        own = [change.ratio.value for change in changes if change.test == test]
        print(
            f"{test}: {count(len(own), 'part')}, {median(own) - 1:+.1%} in the median, {min(own) - 1:+.1%} at the least"
        )
    print(f"{count(len(slower), 'result')} of {len(changes)} slower than on {before['date']}")
    return SOME_FAILED if slower else COMPLETE


COMMAND = Subcommand(
    "accept",
    __doc__,
    {"": (AcceptRequest, accept), "verify": (VerifyRequest, verify), "compare": (CompareRequest, compare)},
)
main = COMMAND.main
