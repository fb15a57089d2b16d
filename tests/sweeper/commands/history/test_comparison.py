"""Later runs against a history: verdicts, refusals by name, and what a pipeline reads."""

import xml.etree.ElementTree as ElementTree

import pytest

from sweeper.commands.history.new_runs import NewRun, append, compare
from sweeper.commands.history.output import build_junit, build_markdown
from sweeper.commands.history.reference_file import History
from sweeper.results.runs import Gate, Verdict
from tests.support.histories import IDENTITY, build_history, new_run, recorded_run
from workloads.api.errors import UserInputError

HISTORY = build_history([659, 661, 658, 660, 659.5, 660.5, 657, 662, 660, 659, 661, 660])
GATE = Gate()


@pytest.mark.parametrize(
    ("value", "verdict"), [(660.0, Verdict.NOT_SLOWER), (640.0, Verdict.SLOWER), (700.0, Verdict.FASTER)]
)
def test_a_run_is_compared_with_the_level_of_its_series(value: float, verdict: Verdict) -> None:
    (compared,) = compare(HISTORY, [new_run(value)], GATE)
    assert compared.result and compared.result.verdict is verdict and "(12 runs)" in compared.earlier
    assert compared.changed == "torch 2.12.0 to 2.11.0"


def test_several_sweeps_are_runs_of_one_version() -> None:
    (compared,) = compare(build_history([660, 655]), [new_run(650, 100), new_run(652, 101)], GATE)
    assert "(2 runs)" in compared.now and compared.result and compared.result.verdict is Verdict.INCONCLUSIVE
    assert compared.result.more_new + compared.result.more_earlier == 8  # until 12 runs measure what runs differ by


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"work": {"workload": "matmul", "type": "fp16"}}, "not in the history: type fp16 against bf16"),
        ({"device": "NVIDIA A100"}, "not in the history: device NVIDIA A100 against NVIDIA H200"),
        ({"devices": 8}, "not in the history: number of devices 8 against 1"),
        ({"basis": "single trial"}, "not in the history: basis single trial against finals"),
    ],
)
def test_other_work_and_other_hardware_are_refused_by_name(changes: dict[str, object], reason: str) -> None:
    (unknown,) = compare(HISTORY, [new_run(660.0, **changes)], GATE)
    assert unknown.result is None and unknown.detail == reason


def test_a_run_is_not_compared_with_itself() -> None:
    known = NewRun(IDENTITY, recorded_run(0, 659))
    (compared,) = compare(HISTORY, [known], GATE)
    assert "(11 runs)" in compared.earlier
    (unknown,) = compare(build_history([659]), [known], GATE)
    assert "no other run of this work" in unknown.detail
    (unknown,) = compare(History(), [known], GATE)
    assert "the history is empty" in unknown.detail


def test_a_level_is_no_mixture_of_two_speeds() -> None:
    with pytest.raises(UserInputError, match=r"night-100: slower than the runs before \(-3.0%\). --new-level"):
        append(HISTORY, [new_run(640)], GATE, new_level=False)
    with pytest.raises(UserInputError, match=r"faster than the runs before \(\+6.1%\)"):
        append(HISTORY, [new_run(700)], GATE, new_level=False)
    with pytest.raises(UserInputError, match="night-0 of 2026-01-01T03:00:00Z: already in the history"):
        append(HISTORY, [NewRun(IDENTITY, recorded_run(0, 659))], GATE, new_level=False)
    assert len(append(HISTORY, [new_run(661)], GATE, new_level=False).series[0].level) == 13
    restarted = append(HISTORY, [new_run(700, 100), new_run(702, 101)], GATE, new_level=True).series[0]
    assert len(restarted.level) == 2 and len(restarted.runs) == 14
    assert append(History(), [new_run(1.0)], GATE, new_level=True).series[0].runs[0].starts_level is False


def test_a_pipeline_reads_the_verdicts() -> None:
    """Slower work fails; inconclusive work and work that was not compared are skipped."""
    history = append(HISTORY, [new_run(300, device="A | B")], GATE, new_level=False)
    runs = [new_run(640), new_run(301, 101, device="A | B"), new_run(1.0, devices=8)]
    lines = compare(history, runs, GATE)
    suite = ElementTree.fromstring(build_junit(lines))
    assert [suite.get(name) for name in ("tests", "failures", "skipped")] == ["3", "1", "2"]
    failure, *skipped = [case[0] for case in suite]
    assert failure.tag == "failure" and str(failure.get("message")).startswith("slower, -3.0% (95% -3.5% to ")
    assert "more runs" in str(skipped[0].get("message")) and "number of devices" in str(skipped[1].get("message"))
    markdown = build_markdown(lines, "note")
    assert "| **slower**: 0.2% between runs (measured) | torch 2.12.0 to 2.11.0 |" in markdown
    assert markdown.count("\n|") == 4 and r"A \| B" in markdown and markdown.endswith("\n\nnote\n")
