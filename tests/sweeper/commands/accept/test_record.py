"""The record of an acceptance: its pages, its MLflow run, baselines and comparisons."""

import json
import re
import shutil
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from mlflow import MlflowClient

from benchmarks.acceptance_faults import is_found
from sweeper.commands.accept import main
from sweeper.commands.accept import record as records
from sweeper.commands.accept.causes import add_causes
from sweeper.commands.accept.experiments import Reading
from sweeper.commands.accept.judge import Verdict, describe, judge, overall_verdict
from sweeper.commands.accept.main import COMMAND
from sweeper.commands.accept.page import build_html, build_junit, build_markdown, summarize_tests
from sweeper.commands.doctor.checks import Finding
from tests.support.acceptance import TEST, gpus, readings
from workloads.api.errors import UserInputError


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


def test_the_page_merges_rows_that_differ_in_the_test_alone_and_junit_keeps_them(record: dict[str, Any]) -> None:
    *_, lost = record["results"]
    rows = [lost | {"test": f"test {n}"} for n in range(8)]
    markdown, junit = build_markdown(record | {"results": rows}), build_junit(record | {"results": rows})
    assert markdown.count("not measured: lost") == 1 and ", ".join(row["test"] for row in rows) in markdown
    assert junit.count('message="not measured: lost"') == 8


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
    used = finding | {"by_others": True}  # whose own speed is unknown
    suite = ElementTree.fromstring(build_junit(record | {"results": [], "findings": [used]}))
    assert [failed.get("message") for failed in suite.iter("failure")] == ["FAIL: x"]


def test_only_the_disturbed_gpu_has_tests_without_a_verdict_and_such_a_run_is_no_baseline(tmp_path: Path) -> None:
    of_node = {"node": "n", "networks": {}, "versions": {}, "cpus": 8, "governor": ""}
    of_node |= {"kernel": {"release": "6.8", "command_line": [], "is_guest": True}}
    of_node |= {"shared_gib": 16.0, "free_gib": 64.0, "disk_gib": 100.0}
    healthy = {"vendor": "nvidia", "responds": True, "name": "NVIDIA H100", "driver": "580"}

    def run(*used_gib: float, rates: tuple[float, float] = (700, 500)) -> dict[str, Any]:
        gpus_of = [{**healthy, "number": number, "used_gib": used} for number, used in enumerate(used_gib)]
        states = {"n": {**of_node, "gpus": gpus_of}}
        judgements = add_causes(judge(readings(*rates), "gpu", {}, {}), states)
        findings = main.find_problems(gpus(2, 1), [], list(states.values()))
        sentence = describe(overall_verdict(judgements, findings), judgements, findings)
        return records.build_record(gpus(2, 1), "quick", sentence, judgements, findings, states)

    assert is_found(run(0.0, 8.6), "products", 1)
    assert not is_found(run(0.0, 8.6), "products", 0)
    assert not is_found(run(0.0, 0.0), "products", 1)  # a GPU that is slow by itself fails
    assert not is_found(run(8.6, 0.0), "products", 1) and run(8.6, 0.0)["verdict"] == "fail"
    records.write_record(tmp_path / "accept.json", run(0.0, 8.6, rates=(700, 700)))
    with pytest.raises(UserInputError, match="other processes used n GPU 1 during that run"):
        records.read_baseline(tmp_path, gpus(2, 1), "quick", ["n GPU 0"])


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
    assert [change.verdict for change in slower] == ["fail", "pass"]
    assert slower[0].ratio.change == "-14.3% (no interval)"
    later["results"][0] |= {"value": 700.0 * (slower[0].least - 1e-6)}
    assert records.compare_records(record, later)[0].verdict is Verdict.FAIL and slower[0].least == pytest.approx(0.98)
    later["results"][0] |= {"value": 700.0 * (slower[0].least + 1e-6)}
    assert records.compare_records(record, later)[0].verdict is Verdict.PASS
    later["results"][0] |= {"value": 600.0}
    record["results"][0] |= {"low": 695.0, "high": 705.0}
    certain = records.compare_records(record, later)[0]
    assert "(95% -15.2% to -13.3%)" in certain.ratio.change and certain.verdict is Verdict.FAIL
    later["results"][0] |= {"low": 450.0, "high": 750.0}
    assert records.compare_records(record, later)[0].verdict is Verdict.INCONCLUSIVE


@pytest.mark.parametrize(
    ("location", "verdict"),
    [("n", "inconclusive"), ("n GPU 0", "inconclusive"), ("n GPU 1", "fail"), ("m", "fail"), ("m GPU 0", "fail")],
)
def test_a_part_that_other_processes_used_has_not_become_slower(
    record: dict[str, Any], location: str, verdict: str
) -> None:
    finding = {"location": location, "problem": "", "remedy": "", "affects_results": False, "by_others": True}
    later = json.loads(json.dumps(record)) | {"findings": [finding]}
    later["results"][0] |= {"value": 350.0}
    (slower, *_) = records.compare_records(record, later)
    assert (slower.part, slower.verdict) == ("n GPU 0", verdict)
    assert list(slower.used) == [location] * (verdict == "inconclusive")


@pytest.mark.parametrize(
    ("part", "is_used"),
    [("n", True), ("n GPU 1 + 2", True), ("n GPU 0 + 1", False), ("m + n", True), ("the whole, 2 nodes", True)],
)
def test_use_of_a_gpu_disturbs_the_parts_to_which_it_belongs(part: str, is_used: bool) -> None:
    assert records._is_part_of("n GPU 2", part) == is_used


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

    both = f"{before} and in {tmp_path / 'after'}"
    assert compare_with(first, second, lost) == 3 and f"- m: {TEST}: no result in {both}\n" in capsys.readouterr().out
    lost["value"] = 700.0
    before = seal(tmp_path / "before.json", record)
    assert compare_with(first, second, lost) == 0 and "not compared" not in capsys.readouterr().out
    assert compare_with(first, lost) == compare_with(first, second | {"value": None}, lost) == 3
    assert capsys.readouterr().out.count(f"- n GPU 1: {TEST}: no result in {tmp_path / 'after'}\n") == 2
    assert compare_with(first, second, lost, lost | {"part": "new"}) == 3
    shown = capsys.readouterr().out
    assert f"- new: {TEST}: no result in {before}\n" in shown and shown.endswith(f"{record['date']}, 1 not compared\n")
    assert compare_with(first | {"value": 300.0}) == 1 and compare_with(first | {"part": "pod"}) == 3
    noisy = {"value": 600.0, "low": 450.0, "high": 750.0}
    before = seal(tmp_path / "wide.json", record | {"results": [first | {"low": 690.0, "high": 710.0}, second, lost]})
    capsys.readouterr()
    assert compare_with(first | noisy, second, lost) == 3 and "? inconclusive: n GPU 0" in capsys.readouterr().out
    with pytest.raises(UserInputError, match="the profile quick and burn_in: only equal ones compare"):
        records.compare_records(record, record | {"profile": "burn_in"})


def test_a_comparison_in_json_has_changes_limits_and_missing_results(
    record: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second, lost = record["results"]
    before = seal(tmp_path / "before", record | {"results": [first | {"low": 690.0, "high": 710.0}, second, lost]})
    later = [first | {"value": 630.0, "low": 620.0, "high": 640.0}, second | {"value": 606.0}]
    after = seal(tmp_path / "after", record | {"results": later})
    assert COMMAND.run(["compare", before, after, "format=json"]) == 1
    shown = json.loads(capsys.readouterr().out)
    slow, fast = shown["changes"]
    assert (slow["part"], slow["test"], slow["verdict"]) == ("n GPU 0", TEST, "fail")
    assert slow["change"] == pytest.approx(-0.1) and slow["interval"][0] < -0.1 < slow["interval"][1] < 0
    assert (fast["verdict"], fast["interval"], fast["slower_below"]) == ("pass", None, pytest.approx(-0.02))
    assert fast["change"] == pytest.approx(0.01) and shown["before"] == shown["after"] == record["date"]
    both = f"no result in {before} and in {after}"
    assert shown["missing"] == [{"part": "m", "test": TEST, "reason": both}]


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
