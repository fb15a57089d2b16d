"""`python -m sweeper accept`: what is measured where, what is expected, and real machines from end to end."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import fields, replace
from io import StringIO
from itertools import chain, islice
from pathlib import Path
from typing import Any, cast

import pytest
from rich.console import Console

from benchmarks.acceptance import SPREADS, read_csv, seen_spread
from benchmarks.verify import list_gpus
from sweeper.commands.accept import main, measure
from sweeper.commands.accept.expected import choose_parameters, expected_rates
from sweeper.commands.accept.experiments import Profile, Reading, read_experiments, spread_of
from sweeper.commands.accept.judge import Verdict, judge, overall_verdict
from sweeper.common.trials import TrialResult, TrialStatus
from tests.conftest import REPOSITORY, environment
from tests.support.acceptance import TEST, gpus, verdicts
from tests.support.ray_cluster import Cluster
from workloads.api import registry
from workloads.api.contract import Measurement
from workloads.api.errors import UserInputError

FILES = {"accept.json", "accept.html", "accept.md", "accept.xml"}


@pytest.mark.parametrize("profile", ["quick", "standard", "burn_in"])
@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_every_experiment_has_valid_parameters_and_its_tests_have_a_spread(kind: str, profile: Profile) -> None:
    for experiment in read_experiments(kind, profile):
        registry.load(experiment.workload).Parameters(**experiment.parameters_for(8))
        assert all(spread_of(kind, test) for test in experiment.tests)


def test_no_assumed_spread_is_smaller_than_what_was_seen_on_our_own_gpus() -> None:
    rows = [row for row in read_csv(SPREADS) if row["hosts"]]
    assert len(rows) >= 8
    for row in rows:
        hosts, gpus, own, total = seen_spread(row["tests"])
        stated = [f"{value:.4f}" if value else "" for value in (own, total)]
        assert [row[name] for name in ("hosts", "gpus", "seen_own", "seen_total")] == [str(hosts), str(gpus), *stated]
        assert own <= spread_of("gpu", row["tests"]).own and total <= spread_of("gpu", row["tests"]).total


def test_nodes_are_measured_alone_then_in_pairs_then_together() -> None:
    phases = measure.plan_phases(gpus(8, 3), ["a", "b", "c"], read_experiments("gpu", "quick"))
    titles = [[job.place for job in phase] for phase in phases]
    assert titles == [["a", "b", "c"], ["b + c"], ["a + c"], ["all 3 nodes"]]
    assert [job.ranks for job in chain(*phases)] == [8, 8, 8, 16, 16, 24]


def test_one_gpu_has_no_collectives_two_have_no_pairs_and_a_model_that_does_not_fit_is_not_trained() -> None:
    def workloads(count: int, hardware: str = "h100") -> set[str]:
        ((job,),) = measure.plan_phases(gpus(count, 1, hardware), ["a"], read_experiments("gpu", "quick"))
        return {f"{experiment.scope} {experiment.workload}" for experiment in job.experiments}

    alone = {"device matmul", "device memory", "device parallel"}
    assert [alone - workloads(1, hardware) for hardware in ("rtx4090", "h100")] == [{"device parallel"}, set()]
    assert workloads(2) - alone == {"node collectives", "node parallel"}
    assert workloads(8) - workloads(2) == {"pair collectives"}


def test_a_training_has_the_planners_fastest_layout_also_on_the_nodes_that_are_left() -> None:
    (*_, e) = (e for e in read_experiments("gpu", "quick") if e.scope == "whole")
    chosen = [choose_parameters(gpus(8, nodes), e, 8 * nodes) for nodes in (64, 63)]
    assert [(c["dp_replicate"], c["dp_shard"], c["global_batch"]) for c in chosen] == [(16, 32, 2048), (21, 24, 2016)]


@pytest.mark.parametrize("count", range(2, 71))
def test_every_node_meets_others_in_about_log2_rounds_of_disjoint_pairs(count: int) -> None:
    rounds = measure.pair_rounds(count)
    assert len(rounds) == math.ceil(math.log2(count)) and {*chain(*chain(*rounds))} == {*range(count)}
    assert len({tuple(pair) for pair in chain(*rounds)}) == len(rounds) * (count // 2)
    for pairs in rounds:
        assert len(set(chain(*pairs))) == 2 * len(pairs) and len(pairs) == count // 2


def read(
    ranks: list[Measurement], status: TrialStatus, reason: str = "", metric: str = "tflops", **of_result: Any
) -> list[Reading]:
    """Return the readings of a result of the first experiment that has such a metric, on a node of two GPUs."""
    ((job,),) = measure.plan_phases(gpus(2, 1), ["n"], read_experiments("gpu", "quick"))
    experiment = next(e for e in job.experiments if metric in e.tests.values())
    result = TrialResult(status, 0.0, 1.0, reason, measurements=tuple(ranks), **of_result)
    return list(measure.read_result(job, experiment, result))


def test_a_test_is_left_out_only_where_no_part_supports_it_and_not_for_lack_of_memory() -> None:
    unsupported, no_memory = (read([], TrialStatus.INFEASIBLE, reason) for reason in ("no fp8", "out of memory: x"))
    assert {reading.problem for reading in unsupported} == {"infeasible: no fp8"}
    assert measure.leave_out_unsupported(unsupported) == [] and measure.leave_out_unsupported(no_memory) == no_memory
    measured = [replace(unsupported[0], part=f"m GPU {n}", nodes=("m",), value=700.0, problem="") for n in (0, 1)]
    left = measure.leave_out_unsupported([*unsupported, *measured])
    assert {reading.part for reading in left if reading.problem} == {"n GPU 0", "n GPU 1"}
    assert overall_verdict(judge(left, "gpu", {}, {}), []) is Verdict.INCONCLUSIVE


def test_tests_without_a_rate_share_a_line_if_their_reason_is_the_same() -> None:
    late, done = read([], TrialStatus.TIMED_OUT, "x"), [replace(r, value=7.0) for r in read([], TrialStatus.COMPLETE)]
    names = "bf16 products burst, bf16 products sustained"
    assert list(measure.summarize("n", late)) == [f"n: {names}: timed_out: x"]
    burst, *_ = (replace(reading, problem="") for reading in done)
    assert list(measure.summarize("n", [burst, late[-1]])) == [
        "n: bf16 products burst: 7 TFLOP/s",
        "n: bf16 products sustained: timed_out: x",
    ]


def test_one_gpu_out_of_memory_leaves_the_results_of_the_others() -> None:
    full, works = "infeasible: out of memory: x", Measurement({}, (1.0, 1.0), flops_per_step=6e14)
    readings = read([], TrialStatus.INFEASIBLE, "out of memory: x", of_ranks={0: full, 1: works})
    burst = [(reading.part, reading.problem, reading.value) for reading in readings if reading.test.endswith("burst")]
    assert burst[0][:2] == ("n GPU 0", full) and burst[1] == ("n GPU 1", "", pytest.approx(600.0))


@pytest.mark.parametrize("metrics", [{"bus_gb_s": 0.0}, {"bus_gb_s": math.nan}, {"bus_gb_s": math.inf}, {}])
def test_a_result_without_a_rate_above_zero_has_no_verdict(metrics: dict[str, float]) -> None:
    ranks = [Measurement({}, (0.1,) * 5, metrics=metrics)] * 2
    (result,) = read(ranks, TrialStatus.COMPLETE, metric="bus_gb_s")
    assert result.problem == "no value" and math.isnan(result.value)
    baseline = {(result.test, result.part): 350.0}
    assert verdicts(judge([result], "gpu", baseline, baseline)) == ["inconclusive"]


def test_a_running_test_is_shown_with_its_time_and_its_end_and_the_cut_one_differs_from_those_that_never_ran() -> None:
    ((job,),) = measure.plan_phases(gpus(2, 1), ["n"], read_experiments("gpu", "quick"))
    text, now_s = StringIO(), time.monotonic()
    known: dict[str, Any] = dict.fromkeys((field.name for field in fields(main.Run)), None)
    known |= {"console": Console(file=text, width=200), "started_s": now_s - 100, "deadline_s": now_s + 155}
    job.pool, job.started_s, job.deadline_s = cast("Any", object()), now_s - 80, now_s + 340
    main.Run(**known).name_running([job])
    job.deadline_s = now_s + 20
    main.Run(**known).name_running([job])
    test, *_ = job.experiments[0].tests
    shown = [f"  100 s    running: n: {test} (for 80 s, cut at {end_s} s)\n" for end_s in (255, 120)]
    assert text.getvalue() == "".join(shown)
    ended = [job.poll(now_s - 1) for _ in range(3)]
    cut, *late = [result.reason for one in ended if one for _, result in [one]]
    assert cut == "the time of this profile ended after it had run for 80 s"
    assert late == ["no time was left for it in this profile"] * 2


def test_the_whole_of_fewer_nodes_is_another_part() -> None:
    *_, (whole,) = measure.plan_phases(gpus(8, 3), ["a", "b", "c"], read_experiments("gpu", "quick"))
    parts = [[*measure.parts_of(job, whole.experiments[0])] for job in (whole, whole.without({"b"}))]
    assert parts == [["the whole, 3 nodes"], ["the whole, 2 nodes"]]


def test_the_expected_rates_are_the_catalogues_the_tables_and_the_planners() -> None:
    target = gpus(2, 1)
    rates = {
        test: rate
        for experiment in read_experiments("gpu", "quick")
        for test, rate in expected_rates(target, experiment, 2).items()
    }
    assert rates["bf16 products sustained"] == 690 and rates["bf16 products burst"] == pytest.approx(690 * 1.15)
    assert rates["memory copy"] == pytest.approx(0.85 * 3350) and rates["node training"] > 50_000
    slower = [
        Reading((drift := f"{TEST}, end over start"), "device", "n GPU 0", ("n",), "", rate) for rate in (0.9, 0.6)
    ]
    expected = {(drift, "n GPU 0"): rates[drift]}
    assert [verdicts(judge([one], "gpu", expected, {})) for one in slower] == [["pass"], ["fail"]]


def test_an_unknown_device_is_named_before_anything_runs() -> None:
    with pytest.raises(UserInputError, match=r"hardware=h1000: unknown hardware. Did you mean h100\? Available: "):
        main.accept(main.AcceptRequest(hardware="h1000"))


@pytest.mark.parametrize("profile", ["quick", "standard", "burn_in"])
def test_no_trial_of_a_profile_is_ended_before_its_run_is_over(profile: Profile) -> None:
    for experiment in read_experiments("gpu", profile):
        assert measure.timeout_s(experiment) > 60 + experiment.parameters.get("sustained_s", 0)


@pytest.mark.gpu
@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("fault", ["products", "copies", "memory", "link", "numa"])
def test_another_process_on_a_gpu_or_its_cores_is_found_and_named(fault: str) -> None:
    if fault == "link" and len(list_gpus()) < 2:
        pytest.skip("needs two GPUs")
    command = [sys.executable, "-m", "benchmarks.acceptance_faults", fault]
    ran = subprocess.run(command, cwd=REPOSITORY, env=environment(), capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.soak
@pytest.mark.timeout(400)
@pytest.mark.parametrize("ends_ray", [False, True])  # batch systems signal the whole process group
def test_a_machine_without_gpus_is_measured_and_an_interrupted_run_has_its_page_and_is_resumed(
    ends_ray: bool, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "sweeper", "accept", "hardware=cpu", f"dir={tmp_path}"]
    options: dict[str, Any] = {"cwd": REPOSITORY, "env": environment() | {"PYTHONUNBUFFERED": "1"}, "text": True}
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True, **options) as process:
        assert process.stdout
        for line in process.stdout:
            if "memory copy" in line:
                if ends_ray:
                    os.killpg(process.pid, signal.SIGTERM)
                else:
                    process.send_signal(signal.SIGINT)
                signaled_s = time.monotonic()
                break
        rest = process.stdout.read()
    assert time.monotonic() - signaled_s < 60
    assert process.returncode == 130 and "verdict is on what was measured until now" in rest, rest
    assert {file.name for file in next(tmp_path.glob("acceptance/cpu-2*")).iterdir()} == FILES
    result = subprocess.run(command, capture_output=True, timeout=300, **options)
    assert result.returncode == 3, result.stdout + result.stderr  # nothing to compare a single processor with
    record = json.loads(max(tmp_path.glob("acceptance/*/accept.json")).read_text())
    assert {row["test"] for row in record["results"]} >= {"fp32 products sustained", "node all-reduce 4 MiB"}
    assert record["sentence"] in result.stdout and not list(tmp_path.rglob("*.unfinished"))
    measured = "memory copy: " in line and "inconclusive" not in line  # else other processes held the processor
    assert not measured or ("resumed " in result.stdout and "s    " in line and line[8:] not in result.stdout)


# Runs experiments of the probe on the nodes of a cluster, and prints each result with its time.
PROBES = """
import json, sys, time
from sweeper.commands.accept import measure
from sweeper.commands.accept.experiments import Experiment
from sweeper.execution import cluster
measure.LAST_S, started_s = 12.0, time.monotonic()
target, _ = cluster.find_target("h200", sys.argv[1], True)
probes = [("device", 0.0), ("device", 3.0), ("link", 0.0), ("whole", 0.0)]
experiments = [Experiment("probe", scope, {"sleep_s": s}, {f"{scope} {s}": "score"}) for scope, s in probes]
phases = measure.plan_phases(target, [node.id for node in target.nodes], experiments)
for job, experiment, result in measure.run_phases(phases, started_s + 100):
    measured = sum(not isinstance(one, str) for one in result.of_ranks.values())  # of a test that ends without a result
    print(json.dumps([*experiment.tests, job.names, result.status, measured]), flush=True)
cluster.stop()
"""


@pytest.mark.long(35)
@pytest.mark.parametrize("cluster", [3], indirect=True)
def test_a_node_with_a_hung_process_keeps_the_others_result_and_takes_no_further_part(
    cluster: Cluster,
) -> None:
    command, pids = [sys.executable, "-c", PROBES, cluster.address], list[int]()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment()) as process:
        assert process.stdout
        results = [json.loads(line) for line in islice(process.stdout, 3)]
        hung = cluster.nodes[1].node_id
        pids = cluster.worker_pids(cluster.nodes[1])
        os.kill(pids[0], signal.SIGSTOP)
        results += [json.loads(line) for line in process.stdout]
    for pid in {*pids} & {*cluster.worker_pids()}:
        os.kill(pid, signal.SIGKILL)
    assert process.returncode == 0 and len(pids) == 2
    without = {(test, status, n) for test, names, status, n in results if hung in names and status != "complete"}
    assert without == {("device 3.0", "timed_out", 1), ("link 0.0", "cancelled", 0)}  # the other process has a result
    # The rounds for three nodes lack one of the three pairs.
    others = [(test, len(names)) for test, names, *_ in results if hung not in names and "link" not in test]
    assert sorted(others) == [("device 0.0", 1)] * 2 + [("device 3.0", 1)] * 2 + [("whole 0.0", 2)]
