"""Accept a cluster: check whether it is as fast as expected, and find the slow parts.

    python -m sweeper accept
    python -m sweeper accept cluster.address=auto profile=standard dir=/data/accept
    python -m sweeper accept baseline=acceptance/h100-20261120-101500/accept.json

Measures each device alone and all devices at once (burst and sustained GEMMs, memory, copies to and from the host),
then each node (collectives by size, a training step), pairs of nodes in rounds, and the whole cluster. Each result is
compared with the other parts' results, with the rate expected by the hardware catalog or the planner, and with the
baseline, if given. All comparisons together fail about 1% of healthy clusters, if parts vary as assumed
(docs/guides/accept.md). The profile quick takes up to 5 minutes, standard up to 30; burn_in stresses GPUs for minutes.

Writes accept.json, an HTML page, Markdown and JUnit XML to DIR/acceptance/HARDWARE-DATE, and logs these files as a run
in the MLflow experiment acceptance. `verify` checks that an accept.json is unchanged; `compare` prints the results that
are slower than in an earlier run. The exit code is 0 if everything passes, 1 if a part fails, and 3 if a part is
inconclusive, such as a part that another process uses. The command changes nothing on the machines and does not need
root.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any, Literal

from rich.console import Console

from sweeper.cli.command import Cluster, StoreRequest, Subcommand, word
from sweeper.cli.exits import COMPLETE, INTERRUPTED, NO_VERDICT, SOME_FAILED, StopRequests, interpreter
from sweeper.commands.accept import record as records
from sweeper.commands.accept.expected import expected_rates
from sweeper.commands.accept.experiments import Profile, Reading, read_experiments
from sweeper.commands.accept.judge import Verdict, describe, judge, list_problems, merge_equal, overall_verdict
from sweeper.commands.accept.page import build_html, build_junit, build_markdown
from sweeper.commands.accept.record import Change, Missing
from sweeper.commands.doctor.checks import Finding, check_gpu_setup, check_load, check_nodes
from sweeper.common.format import count, name_some
from sweeper.common.grouping import group_values
from sweeper.common.trials import TrialStatus
from sweeper.config.hardware import Node, Target
from sweeper.execution import ray_environment
from sweeper.preflight.devices import describe_inventory
from sweeper.tracking.mlflow_store import ACCEPTANCE_KIND, KIND
from workloads.api.errors import first_line
from workloads.api.secrets import mask

LONGEST_S = {"quick": 255.0, "standard": 1800.0, "burn_in": 7200.0}  # time limit for all experiments
STOP_S = 20.0  # how long a run may go on after a signal; Slurm kills after 30 s
FOLDER = "acceptance"
PAGES = {"accept.html": build_html, "accept.md": build_markdown, "accept.xml": build_junit}


@dataclass(frozen=True, kw_only=True)
class AcceptRequest(StoreRequest):
    """The cluster to accept, and how thoroughly to test it.

    Attributes:
        hardware: name of a local GPU model, or cpu.
        profile: duration of the tests.
        baseline: accept.json of an earlier accepted run, to compare the parts with.
    """

    hardware: str = "auto"
    profile: Profile = "quick"
    baseline: str | None = None
    cluster: Cluster = field(default_factory=Cluster)


@dataclass(frozen=True, kw_only=True)
class VerifyRequest:
    """The accept.json to check, or the folder that contains it."""

    file: str = word("FILE")


@dataclass(frozen=True, kw_only=True)
class CompareRequest:
    """Two acceptance runs on the same machines, the earlier run first.

    Attributes:
        format: text or json.
    """

    first: str = word("BEFORE")
    second: str = word("AFTER")
    format: Literal["text", "json"] = "text"


@dataclass
class Run:
    """What an acceptance knows, from which it can draw a verdict at any time."""

    request: AcceptRequest
    target: Target
    nodes: Sequence[Node]  # including those that are not tested
    watches: Any  # of the tested nodes, a NodeWatches
    journal: records.Journal
    rates: Mapping[tuple[str, str], float]  # expected, by place and test
    baseline: Mapping[tuple[str, str], float]
    console: Console
    readings: list[Reading]
    started_s: float  # on the monotonic clock
    deadline_s: float  # the end of the profile's time, on the same clock

    def tell(self, line: str) -> None:
        self.console.print(f"{time.monotonic() - self.started_s:5.0f} s    {line}")

    def name_running(self, jobs: Sequence[Any]) -> None:
        running, now_s = list[str](), time.monotonic()
        for job in jobs:
            test, end_s = next(iter(job.experiments[0].tests)), min(job.deadline_s, self.deadline_s) - self.started_s
            running.append(f"{job.place}: {test} (for {now_s - job.started_s:.0f} s, cut at {end_s:.0f} s)")
        self.tell(f"running: {name_some(running)}")


def accept(request: AcceptRequest) -> int:
    """Measure the cluster, judge and print the results, and write accept.json. Return the exit code."""
    started_s = time.monotonic()
    address, insecure = request.cluster.address, request.cluster.insecure
    ray_environment.prepare(address, insecure)  # must run before Ray is imported
    from sweeper.commands.accept import measure
    from sweeper.commands.doctor.exercise import NodeWatches
    from sweeper.execution import cluster

    console = Console(highlight=False, soft_wrap=True, markup=False)
    request.open_uri()  # rejects a wrong store before anything runs
    target, nodes = cluster.find_target(request.hardware, address, insecure)
    watches = NodeWatches(target.nodes, request.dir)
    console.print(f"accept     {describe_inventory(target.nodes)}, profile {request.profile}")
    names = list(watches.states)
    for node, state in watches.states.items():
        for finding in check_load(node, state):
            console.print(f"busy       {node}: {finding.problem}: {finding.remedy}, or tests may have no verdict")
    phases = measure.plan_phases(target, names, read_experiments(target.hardware.kind, request.profile))
    planned = [(job, experiment) for job in chain(*phases) for experiment in job.experiments]
    parts = {part for job, e in planned for part in measure.parts_of(job, e)}
    baseline = records.read_baseline(Path(request.baseline), target, request.profile, parts) if request.baseline else {}
    rates = {(job.place, t): rate for job, e in planned for t, rate in expected_rates(job.target, e, job.ranks).items()}
    folder = Path(request.dir).expanduser() / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    file, heading = f"{target.hardware.name}-{request.profile}.unfinished", [records.FORMAT, target.model, names]
    journal = records.Journal(folder / file, json.dumps(heading))
    times_s = started_s, started_s + LONGEST_S[request.profile]
    run = Run(request, target, nodes, watches, journal, rates, baseline, console, journal.read(), *times_s)
    if run.readings:
        console.print(f"resumed    {count(len(run.readings), 'result')} of {journal.path}")
        measure.skip_measured(phases, run.readings)
    return run_to_end(run, phases)


def run_to_end(run: Run, phases: Sequence[Sequence[Any]]) -> int:
    """Run the tests, until a signal or until the head is lost, and conclude. Return the exit code."""
    from sweeper.commands.accept import measure
    from sweeper.execution import cluster, head

    stop, lost_head = StopRequests(shlex.join([interpreter(), "-m", "sweeper", *sys.argv[1:]])), threading.Event()
    ends_s = list[float]()  # on the monotonic clock

    def limit_s() -> float | None:
        if lost_head.is_set() or not stop.requested:
            return 0.0 if lost_head.is_set() else None
        ends_s.append(time.monotonic() + STOP_S)
        return max(0.0, ends_s[0] - time.monotonic())

    def run_tests() -> None:
        outcomes = measure.run_phases(phases, run.deadline_s, lambda: limit_s() is not None, run.name_running)
        with closing(outcomes):  # after an error too, its workers end before Ray
            for job, experiment, result in outcomes:
                new = list(measure.read_result(job, experiment, result))
                run.readings += new
                run.journal.add(new)
                # The list of problems names the tests that were not run.
                for line in measure.summarize(job.place, new) if result.status is not TrialStatus.CANCELLED else ():
                    run.tell(line)

    with head.on_head_lost(lambda _: lost_head.set()):
        try:
            cluster.start(run.target, has_variables=False)
        except (KeyboardInterrupt, SystemExit):  # Ray raises the latter on SIGTERM while it starts
            stop.add()
        stop.install()  # replaces Ray's handlers
        try:
            in_time = all(end_in_time(step, limit_s) for step in (run_tests, run.watches.update, cluster.stop))
        except BaseException:
            cluster.stop()
            stop.restore()
            raise
        if lost_head.is_set() and not stop.requested:
            run.console.print("the cluster's head does not respond")
        code = SOME_FAILED
        try:
            code = conclude(run, interrupted=limit_s() is not None)
        except Exception:
            if in_time:
                raise
            traceback.print_exc()
        code = SOME_FAILED if code == INTERRUPTED and not stop.requested else code
        if not in_time:  # a thread that Ray blocks would keep the process from ending
            sys.stdout.flush()
            os._exit(code)
    stop.restore()
    return code


def end_in_time(step: Callable[[], object], limit_s: Callable[[], float | None]) -> bool:
    """Call a function. Return False if it has not ended within `limit_s()`, which is None until the run is stopped.

    `timeout` and batch systems also signal Ray's own processes. Without them Ray's calls block, so the function runs in
    another thread, and this thread handles signals. Raises the function's error, unless the run is stopped.
    """
    call = ThreadPoolExecutor(1).submit(step)
    while not call.done() and limit_s() is None:
        wait([call], 0.1)
    wait([call], limit_s())
    if limit_s() is None:
        call.result()
    return call.done()


def conclude(run: Run, *, interrupted: bool) -> int:
    """Judge the readings, print the verdict, and write and record its files. Return the exit code."""
    from sweeper.commands.accept import measure
    from sweeper.commands.accept.causes import add_causes

    target, states, console = run.target, run.watches.states, run.console
    if interrupted:
        console.print("interrupted: the verdict is on what was measured until now; rerun the same command to resume")
    findings = find_problems(target, run.nodes, list(states.values()))
    readings = measure.leave_out_unsupported(run.readings)
    expected = {(r.test, r.part): rate for r in readings if (rate := run.rates.get((r.place, r.test)))}
    judgements = add_causes(judge(readings, target.hardware.kind, expected, run.baseline), states)
    verdict = overall_verdict(judgements, findings)
    sentence = describe(verdict, judgements, findings)
    record = records.build_record(target, run.request.profile, sentence, judgements, findings, states)
    folder = run.journal.path.parent / f"{target.hardware.name}-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    folder.mkdir()
    records.write_record(folder / "accept.json", record)
    for name, build in PAGES.items():
        (folder / name).write_text(build(record))
    for line in (*list_problems(judgements, findings), sentence):
        console.print(line)
    console.print(f"written    {folder}: accept.json, {', '.join(PAGES)}")
    console.print(record_run(run.request.open_uri(), folder, record))
    if interrupted:
        return INTERRUPTED
    run.journal.path.unlink(missing_ok=True)
    return {Verdict.PASS: COMPLETE, Verdict.FAIL: SOME_FAILED, Verdict.INCONCLUSIVE: NO_VERDICT}[verdict]


def find_problems(target: Target, nodes: Sequence[Node], states: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """List the tested nodes' problems, and untested nodes' GPU problems, marked as not affecting results."""
    untested = check_gpu_setup([node for node in nodes if node not in target.nodes])
    others = [replace(finding, affects_results=False) for finding in untested]
    return [*check_gpu_setup(target.nodes), *check_nodes(states), *others]


def record_run(uri: str, folder: Path, record: Mapping[str, Any]) -> str:
    """Record the acceptance and its files as an MLflow run. Return a line that reports the outcome."""
    shown = ("verdict", "sentence", "hardware", "model", "profile", "sweeper", records.HASH)
    tags = {name: str(record[name]) for name in shown}
    measured = [row for row in record["results"] if row["value"]]
    values = group_values((f"{row['test']} {row['unit']}", row["value"]) for row in measured)
    metrics = {re.sub(r"[^\w\-. :/]", "", name).strip(): median(own) for name, own in values.items()}
    metrics["failed"] = float(sum(row["verdict"] == Verdict.FAIL for row in record["results"]))
    try:
        from sweeper.commands.ingest.write import write_run  # MLflow takes seconds to import

        write_run(uri, FOLDER, folder.name, {KIND: ACCEPTANCE_KIND} | tags, metrics, sorted(folder.iterdir()))
    except Exception as error:  # no error of a store may change the verdict
        return f"not recorded in MLflow: {mask(first_line(error))}"
    return f"recorded   experiment {FOLDER} of {mask(uri)}"


def verify(request: VerifyRequest) -> int:
    """Print whether an accept.json is unchanged, and return the exit code."""
    record = records.read_record(Path(request.file), may_be_changed=True)
    unchanged = record[records.HASH] == records.hash_of(record)
    print(f"{'unchanged' if unchanged else 'CHANGED'}: {request.file}, {record['date']}: {record['sentence']}")
    return COMPLETE if unchanged else SOME_FAILED


def compare(request: CompareRequest) -> int:
    """Print slower, inconclusive and missing results. Return 1 if any is slower, else 3 if there are any."""
    before, after = (records.read_record(Path(file)) for file in (request.first, request.second))
    changes = records.compare_records(before, after)
    missing = records.find_missing({request.first: before, request.second: after})
    verdicts = {change.verdict for change in changes}
    if request.format == "json":
        dates = {"before": before["date"], "after": after["date"]}
        print(json.dumps(dates | records.export(changes, missing), indent=1, ensure_ascii=False))
    else:
        for line in describe_changes(changes, missing, before["date"]):
            print(line)
    is_open = missing or Verdict.INCONCLUSIVE in verdicts or not changes
    return SOME_FAILED if Verdict.FAIL in verdicts else NO_VERDICT if is_open else COMPLETE


def describe_changes(changes: Sequence[Change], missing: Sequence[Missing], date: str) -> Iterator[str]:
    """Yield lines: slower results, then inconclusive and missing results, then a line for each test and the count."""
    slower, unsure = ([c for c in changes if c.verdict is kind] for kind in (Verdict.FAIL, Verdict.INCONCLUSIVE))
    for one in (*slower, *unsure):
        shown = f"{one.part}: {one.test}: {one.ratio.change}, the limit is {one.least - 1:+.1%}"
        shown += f"; other processes used {name_some(one.used)}" if one.used else ""
        yield f"{'!' if one in slower else '? inconclusive:'} {shown}"
    for parts, tests, reason in merge_equal(missing):
        yield f"- {name_some(parts)}: {name_some(tests)}: {reason}"
    for test, own in group_values((change.test, change) for change in changes).items():
        middle, lowest = median(change.ratio.value for change in own) - 1, own[0]
        shown = f"median {middle:+.1%}, lowest {lowest.ratio.change}, slower below {lowest.least - 1:+.1%}"
        yield f"{test}: {count(len(own), 'part')}, {shown}"
    left_out = f", {len(missing)} not compared" if missing else ""
    yield f"{count(len(slower), 'result')} of {len(changes)} slower than on {date}{left_out}"


COMMAND = Subcommand(
    "accept",
    __doc__,
    {"": (AcceptRequest, accept), "verify": (VerifyRequest, verify), "compare": (CompareRequest, compare)},
)
main = COMMAND.main
