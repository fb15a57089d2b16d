"""`python -m sweeper accept`: what is measured where, verdicts, the record, and a processor from end to end."""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from mlflow import MlflowClient

from benchmarks.acceptance import SPREADS, read_csv, seen_spread, share_found
from benchmarks.verify import list_gpus
from sweeper.commands.accept import main, measure
from sweeper.commands.accept import record as records
from sweeper.commands.accept.causes import UNKNOWN, add_causes
from sweeper.commands.accept.expected import choose_parameters, expected_rates
from sweeper.commands.accept.experiments import Profile, Reading, read_experiments, spread_of
from sweeper.commands.accept.judge import Judgement, Verdict, describe, judge, overall_verdict
from sweeper.commands.accept.page import build_html, build_junit, build_markdown, summarize_tests
from sweeper.commands.doctor.checks import Finding
from sweeper.common.trials import TrialResult, TrialStatus
from sweeper.config.catalogue import catalogue
from sweeper.config.hardware import Target
from sweeper.preflight.devices import planned_target
from tests.conftest import REPOSITORY, environment
from tests.support.ray_cluster import Cluster
from workloads.api import registry
from workloads.api.contract import Measurement
from workloads.api.errors import UserInputError
from workloads.api.gpu_setup import GpuProblem

TEST = "bf16 products sustained"
FILES = {"accept.json", "accept.html", "accept.md", "accept.xml"}


def gpus(per_node: int, nodes: int, hardware: str = "h100") -> Target:
    planned = planned_target(catalogue()[hardware], per_node)
    return replace(planned, nodes=(replace(planned.nodes[0], gpus=per_node, cpus=8),) * nodes)


def readings(*rates: float, test: str = TEST) -> list[Reading]:
    return [Reading(test, "device", f"n GPU {n}", ("n",), "TFLOP/s", rate) for n, rate in enumerate(rates)]


def verdicts(judgements: list[Judgement]) -> list[str]:
    return [judgement.verdict.value for judgement in judgements]


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


def test_a_slow_gpu_fails_by_its_peers_and_a_slow_fleet_by_the_expected_rate() -> None:
    assert verdicts(judge(readings(700, 702, 600, 698, 701, 699, 703, 697), "gpu", {}, {})).count("fail") == 1
    fleet = readings(500, 502, 498, 501)
    expected = {(reading.test, reading.part): 690.0 for reading in fleet}
    assert set(verdicts(judge(fleet, "gpu", expected, {}))) == {"fail"}


def test_a_part_without_anything_to_compare_it_with_has_no_verdict_and_with_a_baseline_has_one() -> None:
    (one,) = readings(700)
    assert verdicts(judge([one], "gpu", {}, {})) == ["measured"]
    for rate, verdict in ((705.0, "pass"), (760.0, "fail")):
        assert verdicts(judge([one], "gpu", {}, {(one.test, one.part): rate})) == [verdict]


def test_a_rate_whose_interval_includes_the_limit_has_no_verdict() -> None:
    first, second = readings(600, 700)
    assert verdicts(judge([replace(first, low=500, high=690), second], "gpu", {}, {})) == ["inconclusive", "pass"]


def test_the_sentence_names_what_failed_and_what_is_open() -> None:
    judgements = judge([*readings(600, 700), Reading(TEST, "device", "m", ("m",), "", problem="lost")], "gpu", {}, {})
    verdict = overall_verdict(judgements, [])
    assert verdict is Verdict.FAIL
    assert describe(verdict, judgements, []) == ("FAIL: n GPU 0 too slow; m without a verdict, in 1 test of 3 parts")
    first = "n GPU 0 measured, and nothing to compare with: set baseline= to this accept.json in the next run"
    assert describe(Verdict.INCONCLUSIVE, judge(readings(700), "cpu", {}, {}), []).startswith(
        f"INCONCLUSIVE: {first}, "
    )
    assert describe(Verdict.INCONCLUSIVE, [], []) == "INCONCLUSIVE: nothing was measured, in 0 tests of 0 parts"


def test_a_problem_of_a_gpu_fails_the_whole_and_one_of_a_node_leaves_it_open() -> None:
    passed = judge(readings(700, 700), "gpu", {}, {})
    for location, verdict in (("n GPU 1", Verdict.FAIL), ("n", Verdict.INCONCLUSIVE)):
        assert overall_verdict(passed, [Finding(location, "p", "r")]) is verdict


def test_a_problem_of_a_node_that_is_not_tested_is_named_and_does_not_count() -> None:
    target = gpus(2, 1)
    broken = replace(target.nodes[0], gpu_problems=(GpuProblem("p", "r"),))
    assert [f.affects_results for f in main.find_problems(target, [*target.nodes, broken], [])] == [False]
    assert [f.affects_results for f in main.find_problems(replace(target, nodes=(broken,)), [broken], [])] == [True]


def test_an_unknown_device_is_named_before_anything_runs() -> None:
    with pytest.raises(UserInputError, match=r"hardware=h1000: unknown hardware. Did you mean h100\? Available: "):
        main.accept(main.AcceptRequest(hardware="h1000"))


def test_results_that_nothing_compares_with_do_not_leave_a_compared_whole_open() -> None:
    judgements = judge([*readings(700, 701), *readings(50, test="copy to host")[:1]], "gpu", {}, {})
    assert verdicts(judgements) == ["pass", "pass", "measured"]
    assert overall_verdict(judgements, []) is Verdict.PASS
    assert overall_verdict(judgements[2:], []) is Verdict.INCONCLUSIVE


def test_a_node_whose_gpus_are_all_a_little_slow_fails_by_their_median_and_not_by_one_slow_gpu() -> None:
    def cluster(slow: float, of: range) -> list[Reading]:
        rates = [[700 + (node * 8 + gpu) % 5 for gpu in range(8)] for node in range(16)]
        for gpu in of:
            rates[3][gpu] *= slow
        named = ((f"n{node}", gpu, rate) for node, own in enumerate(rates) for gpu, rate in enumerate(own))
        return [Reading(TEST, "device", f"{node} GPU {gpu}", (node,), "TFLOP/s", rate) for node, gpu, rate in named]

    def failed(readings: list[Reading]) -> list[str]:
        return [j.reading.part for j in judge(readings, "gpu", {}, {}) if j.verdict is Verdict.FAIL]

    assert failed(cluster(0.95, range(8))) == ["n3"]
    assert failed(cluster(0.7, range(1))) == ["n3 GPU 0"]


def test_a_gpu_that_does_less_with_a_cycle_fails_at_equal_clock_and_one_with_a_lower_clock_does_not() -> None:
    rates, clocks_mhz = (700.0, 690.0, 705.0, 660.0), (1400.0, 1380.0, 1410.0, 1400.0)
    own = [replace(r, beside={"sm_clock_mhz": mhz}) for r, mhz in zip(readings(*rates), clocks_mhz, strict=True)]
    failed = [(j.reading.test, j.reading.part) for j in judge(own, "gpu", {}, {}) if j.verdict is Verdict.FAIL]
    assert failed == [(f"{TEST}, at equal clock", "n GPU 3")]
    assert len(judge([*own[:3], replace(own[3], beside={})], "gpu", {}, {})) == 4  # one clock is not known


def test_a_gpu_that_slows_down_while_the_others_do_not_fails_with_its_clocks_drift_as_the_cause() -> None:
    ((job,),) = measure.plan_phases(gpus(2, 1), ["n"], read_experiments("gpu", "burn_in"))
    metrics = {"sustained_sm_clock_drift_mhz": -120.0, "sustained_temperature_drift_c": 14.0}
    steady = Measurement({}, (0.1,) * 5, sustained_step_times_s=(0.1,) * 1000, flops_per_step=1e13, matrix_dtype="bf16")
    slower = replace(steady, sustained_step_times_s=(0.1,) * 500 + (0.11,) * 500, metrics=metrics)
    result = TrialResult(TrialStatus.COMPLETE, 0.0, 1.0, "", measurements=(steady, slower))
    own = [r for r in measure.read_result(job, job.experiments[0], result) if r.test.endswith("end over start")]
    passed, failed = add_causes(judge(own, "gpu", {}, {}), {"n": state("n")})
    assert (passed.reading.value, failed.reading.value) == (1.0, pytest.approx(1 / 1.1))
    assert failed.cause.startswith("its clock fell by 120 MHz, while its temperature") and not passed.cause


@pytest.mark.parametrize("profile", ["quick", "standard", "burn_in"])
def test_no_trial_of_a_profile_is_ended_before_its_run_is_over(profile: Profile) -> None:
    for experiment in read_experiments("gpu", profile):
        assert measure.timeout_s(experiment) > 60 + experiment.parameters.get("sustained_s", 0)


@pytest.fixture
def record() -> dict[str, Any]:
    """Return the record of two nodes, of which one has a slow GPU and another driver."""
    judgements = judge([*readings(700, 600), Reading(TEST, "device", "m", ("m",), "", problem="lost")], "gpu", {}, {})
    states = [
        {"kernel": {"release": "6.8", "command_line": []}, "versions": {}, "cpus": 8, "governor": "", "networks": {}}
        | {"gpus": [{"driver": driver, "memory_gib": 79.6474609375}] * 2}
        for driver in ("580", "580", "570")
    ]
    finding = Finding("n", "/dev/shm has 0.1 GiB", "more")
    return records.build_record(
        gpus(2, 1), "quick", "FAIL: x", judgements, [finding], dict(zip("nmo", states, strict=True))
    )


def test_the_pages_begin_with_what_failed_and_name_the_nodes_that_differ(record: dict[str, Any]) -> None:
    markdown = build_markdown(record).splitlines()
    assert markdown[0] == "**FAIL: x**" and markdown[6].startswith(f"| fail | n GPU 1 | {TEST} | 600 TFLOP/s |")
    assert "| GPU driver | 580 | o 570 |" in markdown and f"| {TEST} | 2 | TFLOP/s | 650 |" in "\n".join(markdown)
    page = build_html(record)
    titles = ("Failed and open", "Nodes that differ", "Nodes and GPUs", "Tests", "Environment")
    order = ["<h1>FAIL: x", *(f"<h2>{title}" for title in titles)]
    assert sorted(order, key=page.index) == order
    named = {"kernel": "6.8", "cores": "8", "GPUs": "2", "GPU driver": "580", "GPU memory": "79.6 GiB"}
    assert record["nodes"]["n"] == named
    assert "median °C" not in page and "median °C" not in "\n".join(markdown)  # nothing was read
    of_cpu = [row | {"part": "n", "test": "fp32 products burst"} for row in record["results"]]
    page = build_html(record | {"kind": "cpu", "results": of_cpu})
    assert "<h2>Nodes and CPUs" in page and "GPU 0" not in page and '"CPU"' in page


def test_a_rate_is_shown_with_the_digits_in_which_runs_agree(record: dict[str, Any]) -> None:
    (first, second, _), long = record["results"], 93400.28266811225
    training = first | {"test": "node training", "unit": "tokens/s", "value": long, "limit": None}
    rows = list(summarize_tests(record | {"results": [first | {"value": 673.98}, second, training]}))
    assert [row[3:6] for row in rows] == [["637", "600", "674"], ["93,400", "", ""]]
    hot = first | {"beside": {"sm_clock_mhz": 1395.0, "power_w": 698.7}}
    assert next(summarize_tests(record | {"results": [hot]}))[-3:] == ["1,395", "699", ""]


def test_a_failed_part_is_shown_with_digits_that_differ_from_its_limit(record: dict[str, Any]) -> None:
    limit = judge(readings(700, 600), "gpu", {}, {})[1].limit
    assert limit
    failed = judge([*readings(700, limit.lowest * (1 - 2e-6))], "gpu", {}, {})[1]
    reached, least = re.findall(r"[\d.]+%", failed.reason)
    assert failed.verdict is Verdict.FAIL and float(reached[:-1]) < float(least[:-1])
    (row,) = [r | {"value": failed.reading.value} for r in record["results"] if r["part"] == "n GPU 1"]
    shown = build_markdown(record | {"results": [row]}).splitlines()[6].split(" | ")
    assert shown[3] != shown[4] and "-0.0002%" in build_html(record | {"results": [row]})


def test_junit_has_a_case_for_each_result_and_counts_what_has_no_verdict_as_skipped(record: dict[str, Any]) -> None:
    suite = ElementTree.fromstring(build_junit(record))
    assert [suite.get(name) for name in ("tests", "failures", "skipped")] == ["5", "2", "2"]
    whole, slow = suite.iter("failure")
    assert whole.get("message") == "FAIL: x" and "of the others" in slow.get("message", "")


def test_junit_fails_for_a_problem_of_a_gpu_alone(record: dict[str, Any]) -> None:
    finding = {"location": "n GPU 0", "problem": "p", "remedy": "r", "affects_results": True}
    slight = finding | {"location": "n GPU 1", "affects_results": False}
    suite = ElementTree.fromstring(build_junit(record | {"results": [], "findings": [finding, slight]}))
    assert [failed.get("message") for failed in suite.iter("failure")] == ["FAIL: x", "p: r"]


def test_an_acceptance_is_one_run_in_mlflow_with_its_medians_and_files_and_a_store_that_fails_is_named(
    record: dict[str, Any], empty_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")  # as the module does that writes
    shutil.copy(empty_store, tmp_path)
    (folder := tmp_path / "h100-20261126").mkdir()
    records.write_record(folder / "accept.json", record)
    uri = f"sqlite:///{tmp_path / empty_store.name}"
    assert main.record_run(uri, folder, record) == f"recorded   experiment acceptance of {uri}"
    client = MlflowClient(uri)
    (run,) = client.search_runs([client.get_experiment_by_name("acceptance").experiment_id])
    assert run.data.metrics == {f"{TEST} TFLOP/s": 650.0, "failed": 1.0} and run.data.tags["verdict"] == "fail"
    assert [file.path for file in client.list_artifacts(run.info.run_id)] == ["accept.json"]
    (tmp_path / "text.db").write_text("not a database")
    assert main.record_run(f"sqlite:///{tmp_path}/text.db", folder, record).startswith("not recorded in MLflow: ")


def test_half_a_line_of_a_killed_process_does_not_end_the_next_starts(tmp_path: Path) -> None:
    journal, (first, second, third) = records.Journal(tmp_path / "j", "m of n"), readings(700, 701, 702)
    assert journal.read() == []
    journal.add([first, second])
    journal.path.write_text(journal.path.read_text()[:-20])
    assert [reading.value for reading in journal.read()] == [700]
    journal.add([third])
    assert [reading.value for reading in journal.read()] == [700, 702]


def test_a_change_of_the_record_is_shown_and_its_layout_does_not_matter(
    record: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "accept.json"
    path.write_text(json.dumps(record))
    assert main.verify(main.VerifyRequest(file=str(path))) == 0 and "unchanged" in capsys.readouterr().out
    record["results"][1]["value"] = 700.0
    records.write_record(path, record)
    assert main.verify(main.VerifyRequest(file=str(tmp_path))) == 1 and "CHANGED" in capsys.readouterr().out
    with pytest.raises(UserInputError, match="was changed after it was written"):
        records.read_baseline(path, gpus(2, 1), "quick", ["n GPU 0"])


def test_a_failed_run_and_one_of_other_devices_are_no_baseline(record: dict[str, Any], tmp_path: Path) -> None:
    records.write_record(tmp_path / "accept.json", record)
    with pytest.raises(UserInputError, match="that run failed"):
        records.read_baseline(tmp_path, gpus(2, 1), "quick", ["n GPU 0"])
    with pytest.raises(UserInputError, match=r"accept.json: is not an accept.json of this version|cannot be read"):
        records.read_record(tmp_path / "none")


def test_a_later_run_is_compared_part_by_part(record: dict[str, Any]) -> None:
    later = json.loads(json.dumps(record))
    later["results"][0] |= {"value": 600.0, "low": 595.0, "high": 605.0}
    slower = records.compare_records(record, later)
    assert [change.is_slower for change in slower] == [True, False] and "-14.3% (no interval)" in str(slower[0])
    record["results"][0] |= {"low": 695.0, "high": 705.0}
    certain = records.compare_records(record, later)[0]
    assert "(95% -15.2% to -13.3%)" in str(certain) and certain.is_slower
    later["results"][0] |= {"low": 450.0, "high": 750.0}
    unsure = records.compare_records(record, later)[0]
    assert unsure.is_beyond and not unsure.is_slower


def seal(path: Path, record: dict[str, Any]) -> str:
    """Write a record with its hash. Returns the path."""
    records.write_record(path, record | {"sha256": records.hash_of(record)})
    return str(path)


def test_a_baseline_of_another_profile_or_of_other_parts_is_refused(record: dict[str, Any], tmp_path: Path) -> None:
    path = Path(seal(tmp_path / "b.json", record | {"verdict": "inconclusive"}))
    with pytest.raises(UserInputError, match="that run has no verdict on m; a baseline must be an accepted run"):
        records.read_baseline(path, gpus(2, 1), "quick", ["n GPU 0"])
    path = Path(seal(tmp_path / "b.json", record | {"verdict": "pass", "results": record["results"][:2]}))
    assert records.read_baseline(path, gpus(2, 1), "quick", ["n GPU 0"])[TEST, "n GPU 0"] == 700.0
    with pytest.raises(UserInputError, match="has profile=quick, and this run profile=burn_in"):
        records.read_baseline(path, gpus(2, 1), "burn_in", ["n GPU 0"])
    with pytest.raises(UserInputError, match="has none of this run's parts, but n GPU 0, n GPU 1"):
        records.read_baseline(path, gpus(2, 1), "quick", ["pod GPU 0"])


def test_a_comparison_has_no_verdict_where_a_result_is_missing_and_fails_where_one_is_slower(
    record: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, (first, second, lost) = seal(tmp_path / "before.json", record), record["results"]

    def compare_with(*results: dict[str, Any]) -> int:
        return main.compare(
            main.CompareRequest(first=before, second=seal(tmp_path / "after", record | {"results": results}))
        )

    assert compare_with(first, second, lost) == 0
    assert compare_with(first) == compare_with(first, second | {"value": None}) == 3
    assert f"- {TEST}: only in {before}: n GPU 1" in capsys.readouterr().out
    assert compare_with(first | {"value": 300.0}) == 1 and compare_with(first | {"part": "pod"}) == 3
    noisy = {"value": 600.0, "low": 450.0, "high": 750.0}
    before = seal(tmp_path / "wide.json", record | {"results": [first | {"low": 690.0, "high": 710.0}, second, lost]})
    capsys.readouterr()
    assert compare_with(first | noisy, second, lost) == 3 and "? inconclusive: n GPU 0" in capsys.readouterr().out
    with pytest.raises(UserInputError, match="the profile quick and burn_in: only equal ones compare"):
        records.compare_records(record, record | {"profile": "burn_in"})


def test_a_comparison_with_a_changed_file_and_one_without_a_date_are_refused(
    record: dict[str, Any], tmp_path: Path
) -> None:
    changed, whole = tmp_path / "changed", seal(tmp_path / "whole", record)
    records.write_record(changed, record | {"verdict": "pass"})
    for first, second in ((str(changed), whole), (whole, str(changed))):
        with pytest.raises(UserInputError, match="changed: was changed after it was written"):
            main.compare(main.CompareRequest(first=first, second=second))
    with pytest.raises(UserInputError, match=r"is not a whole accept\.json, it has no date$"):
        main.verify(
            main.VerifyRequest(file=seal(changed, {name: value for name, value in record.items() if name != "date"}))
        )


def link(first: str, second: str, rate: float) -> Reading:
    return Reading("link all-reduce 1 GiB", "link", f"{first} + {second}", (first, second), "GB/s", rate)


def state(node: str, **gpu: Any) -> dict[str, Any]:
    """Return the state of a healthy node with two GPUs; of the second one with changes."""
    healthy = {"vendor": "nvidia", "responds": True, "pcie_width": 16, "pcie_width_max": 16}
    gpus = [{"number": 0} | healthy, {"number": 1} | healthy | gpu]
    node_state = {
        "node": node,
        "kernel": {"command_line": [], "is_guest": True},
        "versions": {},
        "cpus": 8,
        "gpus": gpus,
        "networks": {},
    }
    return node_state | {"shared_gib": 16.0, "free_gib": 64.0, "disk_gib": 100.0}


@pytest.mark.parametrize(
    ("gpu", "beside", "cause"),
    [
        ({"power_limit_w": 450.0, "power_default_w": 700.0}, {}, "its power is limited to 450 W of 700 W"),
        ({"pcie_width": 8}, {}, "its PCIe link has 8 of 16 lanes"),
        ({"pcie_generation": 4, "pcie_generation_max": 5}, {}, "generation 4 here, and the GPU's of generation 5"),
        ({"numa_node": 1, "local_cores": 0}, {}, "no core of its NUMA node 1 may be used"),
        ({"links_down": 2}, {}, "2 of its links to other GPUs are down"),
        ({"processes": 3, "used_gib": 0.5}, {}, "3 other processes use it"),
        ({"uncorrected_errors": 4}, {}, "4 uncorrected memory errors"),
        ({}, {"slowed_by": "hardware_thermal", "temperature_c": 91.0}, "thermal at 91.0 °C"),
        ({}, {"sm_clock_mhz": 1100.0, "power_w": 500.0, "power_limit_w": 700.0}, "others' 1400, at 500 W ("),
        ({}, {"sm_clock_mhz": 1100.0, "temperature_c": 61.0}, "1100 MHz, the others' 1400, at 61.0 °C ("),
        (
            {"vendor": "amd", "power_limit_w": 550.0, "power_default_w": 750.0},
            {},
            "amd-smi set --gpu 1 --power-cap 750",
        ),
        ({"load": 20.0}, {}, "other processes hold its cores, load 20.0 on 8"),
        ({"governor": "powersave"}, {}, "the frequency governor is powersave"),
        ({"risen": {"pcie_replays": 3}}, {}, UNKNOWN),  # what healthy GPUs count is not known
        ({}, {}, UNKNOWN),
    ],
)
def test_a_failure_has_the_cause_that_was_read_beside_it(
    gpu: dict[str, Any], beside: dict[str, Any], cause: str
) -> None:
    fast, slow = readings(700, 500)
    fast, slow = replace(fast, beside={"sm_clock_mhz": 1400.0}), replace(slow, beside=beside)
    of_node = state("n", **gpu) | {name: gpu[name] for name in ("load", "governor") if name in gpu}
    passed, failed, *_ = add_causes(judge([fast, slow], "gpu", {}, {}), {"n": of_node})
    assert failed.verdict is Verdict.FAIL and cause in failed.cause and not passed.cause


@pytest.mark.parametrize(("load", "cause"), [(4.0, "n: other processes hold its cores, load 4.0 on 8"), (1.0, UNKNOWN)])
def test_a_slow_cpu_has_the_load_before_the_test_as_its_cause(load: float, cause: str) -> None:
    (slow,) = judge(readings(500), "cpu", {}, {(TEST, "n GPU 0"): 900.0})
    (failed,) = add_causes([slow], {"n": state("n") | {"gpus": [], "load": load}})
    assert failed.verdict is Verdict.FAIL and failed.cause.startswith(cause)


@pytest.mark.parametrize(
    ("problem", "cause"),
    [("infeasible: out of memory", "GPU 1: another process uses it: 70.0 GiB"), ("cancelled: x", "")],
)
def test_a_test_without_a_result_has_the_cause_too_unless_it_was_not_run(problem: str, cause: str) -> None:
    without = [replace(reading, value=math.nan, problem=problem) for reading in readings(1, 1)]
    first, second = add_causes(judge(without, "gpu", {}, {}), {"n": state("n", used_gib=70.0)})
    assert not first.cause and second.cause.startswith(cause) and bool(second.cause) == bool(cause)


@pytest.mark.parametrize(("tested", "cause"), [("b", "GPU 1: its power is limited"), ("a", UNKNOWN)])
def test_the_cause_is_read_of_the_gpu_that_was_tested_whatever_its_rank(tested: str, cause: str) -> None:
    slow, fast = readings(500, 700)
    of_node = state("n", power_limit_w=450.0, power_default_w=700.0)
    for gpu, uuid in zip(of_node["gpus"], "ab", strict=True):
        gpu["uuid"] = f"GPU-{uuid}"
    failed, _ = add_causes(judge([replace(slow, beside={"gpu_uuid": tested}), fast], "gpu", {}, {}), {"n": of_node})
    assert failed.cause.startswith(cause)


def test_a_node_that_is_slow_with_all_partners_is_told_from_a_slow_path_between_two_nodes() -> None:
    names = ["a", "b", "c", "d", "e", "f", "g", "h"]
    pairs = [(names[one], names[two]) for pairs in measure.pair_rounds(8) for one, two in pairs]
    states = {name: state(name) | {"networks": {"eth0": f"MTU {1500 if name == 'd' else 9000}"}} for name in names}

    def causes(slow: Callable[[str, str], bool]) -> dict[str, str]:
        links = [link(*pair, 175.0 if slow(*pair) else 350.0) for pair in pairs]
        return {j.reading.part: j.cause for j in add_causes(judge(links, "gpu", {}, {}), states) if j.cause}

    node = causes(lambda first, second: "d" in (first, second))
    assert set(node) == {"d + e", "d + g", "b + d"} and all("d is slow with most" in cause for cause in node.values())
    assert all("eth0 differs: MTU" in cause for cause in node.values())
    assert causes(lambda first, second: (first, second) == ("a", "c")) == {
        "a + c": "both nodes are as fast as others with other partners: the path between them"
    }


@pytest.mark.parametrize("nodes", [3, 8])
def test_a_link_at_half_its_rate_is_always_found(nodes: int) -> None:
    """In clusters whose healthy rates are drawn with the spreads of the tables."""
    assert share_found(nodes, "link all-reduce 1 GiB", 20, 0.5) == 1


def test_the_only_link_of_two_nodes_is_found_at_half_the_rate_that_the_planner_expects() -> None:
    target = gpus(8, 2)
    (experiment,) = (e for e in read_experiments("gpu", "quick") if e.scope == "link")
    ((test, rate),) = expected_rates(target, experiment, 16).items()
    links = [replace(link("a", "b", share * rate), test=test) for share in (0.5, 1.0)]
    judged = [judge([one], "gpu", {(test, one.part): rate}, {})[0] for one in links]
    assert verdicts(judged) == ["fail", "pass"]


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
