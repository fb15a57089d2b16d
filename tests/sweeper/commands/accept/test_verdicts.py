"""Verdicts of an acceptance: which results fail, and the causes that are found for them."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.acceptance import share_found
from sweeper.commands.accept import main, measure
from sweeper.commands.accept.causes import UNKNOWN, add_causes
from sweeper.commands.accept.expected import expected_rates
from sweeper.commands.accept.experiments import Reading, read_experiments
from sweeper.commands.accept.judge import Verdict, describe, judge, list_problems, overall_verdict
from sweeper.commands.doctor.checks import Finding, check_load, check_node
from sweeper.common.trials import TrialResult, TrialStatus
from tests.support.acceptance import TEST, gpus, readings, verdicts
from workloads.api.contract import Measurement
from workloads.api.gpu_setup import GpuProblem


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
    assert describe(verdict, judgements, []) == "FAIL: n GPU 0 too slow; m without a verdict (1 test of 3 parts in all)"
    first = "n GPU 0 measured, with nothing to compare: set baseline= to this accept.json in the next run"
    assert describe(Verdict.INCONCLUSIVE, judge(readings(700), "cpu", {}, {}), []).startswith(
        f"INCONCLUSIVE: {first} (1 test of 1 part in all)"
    )
    assert describe(Verdict.INCONCLUSIVE, [], []) == "INCONCLUSIVE: nothing was measured (0 tests of 0 parts in all)"


def test_failures_come_first_and_tests_and_parts_with_the_same_reason_share_an_entry() -> None:
    names = [f"test {n}" for n in range(8)]
    late = [Reading(name, "device", f"m GPU {n}", ("m",), "", problem="no time") for n in (0, 1) for name in names]
    other = Reading(names[0], "device", "m GPU 2", ("m",), "", problem="no time")
    shown = list_problems(judge([*late, other, *readings(600, 700)], "gpu", {}, {}), [Finding("m", "p", "r", False)])
    first, *others = shown
    assert first.startswith(f"! n GPU 0: {TEST}: 600 TFLOP/s, 85.7% of the others, passes from ")
    some = "test 0, test 1, test 2, test 3, test 4 and 3 more"
    assert others == [
        "- m: p\n  r",
        f"- m GPU 0, m GPU 1: {some}: not measured: no time",
        "- m GPU 2: test 0: not measured: no time",
    ]


def test_a_problem_of_a_gpu_fails_the_whole_and_one_of_a_node_leaves_it_open() -> None:
    passed = judge(readings(700, 700), "gpu", {}, {})
    for location, verdict in (("n GPU 1", Verdict.FAIL), ("n", Verdict.INCONCLUSIVE)):
        assert overall_verdict(passed, [Finding(location, "p", "r")]) is verdict


def test_a_problem_of_a_node_that_is_not_tested_is_named_and_does_not_count() -> None:
    target = gpus(2, 1)
    broken = replace(target.nodes[0], gpu_problems=(GpuProblem("p", "r"),))
    assert [f.affects_results for f in main.find_problems(target, [*target.nodes, broken], [])] == [False]
    assert [f.affects_results for f in main.find_problems(replace(target, nodes=(broken,)), [broken], [])] == [True]


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
        ({"uncorrected_errors": 4}, {}, "4 uncorrected memory errors"),
        ({}, {"slowed_by": "hardware_thermal", "temperature_c": 91.0}, "thermal at 91.0 °C"),
        ({}, {"sm_clock_mhz": 1100.0, "power_w": 500.0, "power_limit_w": 700.0}, "others' 1400, at 500 W ("),
        ({}, {"sm_clock_mhz": 1100.0, "temperature_c": 61.0}, "1100 MHz, the others' 1400, at 61.0 °C ("),
        (
            {"vendor": "amd", "power_limit_w": 550.0, "power_default_w": 750.0},
            {},
            "amd-smi set --gpu 1 --power-cap 750",
        ),
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
    of_node = state("n", **gpu) | {name: gpu[name] for name in ("governor",) if name in gpu}
    passed, failed, *_ = add_causes(judge([fast, slow], "gpu", {}, {}), {"n": of_node})
    assert failed.verdict is Verdict.FAIL and cause in failed.cause and not passed.cause


BUSY = {"use": 7.9, "busiest": "python3 (pid 41)"}


@pytest.mark.parametrize(
    ("gpu", "node", "beside", "verdict", "cause"),
    [
        ({"processes": 3, "used_gib": 0.5}, {}, {}, "inconclusive", "GPU 1: 3 other processes use it (run nvidia-smi"),
        (
            {"used_gib": 8.6},
            {},
            {},
            "inconclusive",
            "GPU 1: another process uses it: 8.6 GiB of its memory are in use (",
        ),
        ({"used_gib": 8.6}, {}, {"sm_clock_mhz": 900.0}, "inconclusive", "GPU 1: another process uses it"),
        (
            {},
            BUSY,
            {},
            "inconclusive",
            "n: other processes use 7.9 of 8 cores, most of it python3 (pid 41) (end them",
        ),
        ({}, BUSY | {"niceness": 15}, {}, "inconclusive", "n: other processes use 7.9"),
        ({}, {"niceness": 15}, {}, "fail", "n: Ray's workers run at niceness 15"),
        ({}, {"use": 7.0}, {}, "fail", UNKNOWN),
        # What is wrong with the part itself is not excused.
        ({"used_gib": 8.6, "pcie_width": 8}, {}, {}, "fail", "GPU 1: another process uses it"),
        ({"used_gib": 8.6}, {}, {"slowed_by": "hardware_thermal"}, "fail", "GPU 1: another process uses it"),
        ({}, BUSY | {"governor": "powersave"}, {}, "fail", "n: other processes use 7.9"),
        ({"power_limit_w": 450.0, "power_default_w": 700.0}, BUSY, {}, "fail", "GPU 1: its power is limited"),
        ({}, BUSY | {"shared_gib": 0.06}, {}, "fail", "n: /dev/shm has 0.1 GiB"),
    ],
)
def test_a_part_that_other_processes_use_is_not_judged_unless_it_has_a_problem_of_its_own(
    gpu: dict[str, Any], node: dict[str, Any], beside: dict[str, Any], verdict: str, cause: str
) -> None:
    fast, slow = readings(700, 500)
    fast, slow = replace(fast, beside={"sm_clock_mhz": 1400.0}), replace(slow, beside=beside)
    passed, judged, *_ = add_causes(judge([fast, slow], "gpu", {}, {}), {"n": state("n", **gpu) | node})
    assert judged.verdict.value == verdict and judged.cause.startswith(cause) and passed.verdict is Verdict.PASS
    assert ("not judged, because other processes used the part" in judged.reason) == (verdict == "inconclusive")


def test_the_sentence_names_the_other_processes_and_the_remedy_and_only_then() -> None:
    of_node = state("n", used_gib=8.6)
    judged = add_causes(judge(readings(700, 500), "gpu", {}, {}), {"n": of_node})
    findings = list(check_node("n", of_node))
    verdict = overall_verdict(judged, findings)
    assert describe(verdict, judged, findings) == (
        "INCONCLUSIVE: n GPU 1 without a verdict; n GPU 1: another process uses it: 8.6 GiB of its memory are in use; "
        "end other processes and rerun (1 test of 2 parts in all)"
    )
    healthy = judge(readings(700, 690), "gpu", {}, {})
    assert overall_verdict(healthy, findings) is Verdict.INCONCLUSIVE  # no test was slow, but all were disturbed
    broken = [*findings, *check_node("n", state("n", uncorrected_errors=1))]
    assert describe(overall_verdict(healthy, broken), healthy, broken).startswith(
        "FAIL: n GPU 1 with problems; n GPU 1:"
    )
    busy = list(check_load("n", {"gpus": [], "cpus": 2, **BUSY}))
    assert describe(overall_verdict(healthy, busy), healthy, busy).startswith("PASS: nothing is too slow (")


@pytest.mark.parametrize(("use", "is_busy"), [(4.0, True), (3.0, False)])
def test_a_slow_cpu_is_not_judged_if_others_use_its_cores(use: float, is_busy: bool) -> None:
    (slow,) = judge(readings(500), "cpu", {}, {(TEST, "n GPU 0"): 900.0})
    (judged,) = add_causes([slow], {"n": state("n") | {"gpus": [], "use": use}})
    assert judged.verdict is (Verdict.INCONCLUSIVE if is_busy else Verdict.FAIL)
    assert judged.cause.startswith("n: other processes use 4.0 of 8 cores (" if is_busy else UNKNOWN)


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
