"""`python -m sweeper calibrate`: its words, its sweeps, its files, and a calibration of a processor from end to end."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from sweeper.commands.calibrate.main import COMMAND, CalibrateRequest, begin_or_resume, find_target, write_files
from sweeper.commands.calibrate.sweeps import GPU_WORDS, plan_sweeps
from sweeper.commands.calibrate.view import draw_replacements
from sweeper.common.trials import TrialStatus
from sweeper.config.catalogue import catalogue
from sweeper.config.hardware import Target
from sweeper.config.schema import Hardware
from sweeper.preflight.calibration import find_calibration, read_calibration
from sweeper.preflight.clusters import build_cluster
from sweeper.preflight.devices import planned_target
from tests.conftest import CommandResult, environment
from tests.support.calibrations import attention_rows, collective_rows, copy_rows, product_rows
from tests.support.studies import ask_trial, finished, open_study
from workloads.api.errors import UserInputError


def target(gpus: int = 1, nodes: int = 1, hardware: str = "h200") -> Target:
    planned = planned_target(catalogue()[hardware], gpus)
    return replace(planned, nodes=(replace(planned.nodes[0], gpus=gpus),) * nodes)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["hardwre=h200"], r"hardwre: unknown key. Available: .*Did you mean hardware\?"),
        (["h200"], "h200: not of the form key=value. Available: cluster.address"),
        (["dir="], "dir=: has no value"),
    ],
)
def test_an_unknown_word_is_named(words: list[str], message: str) -> None:
    with pytest.raises(UserInputError, match=message):
        COMMAND.run(words)


def test_an_unknown_device_is_named() -> None:
    with pytest.raises(UserInputError, match=r"hardware=h20: unknown hardware. Available: .*Did you mean h200?"):
        find_target(CalibrateRequest(hardware="h20"))


def test_collectives_are_measured_between_gpus_only_and_over_groups_with_different_links(tmp_path: Path) -> None:
    assert list(plan_sweeps(target(), "run", tmp_path, [])) == ["matmul", "memory", "attention"]
    groups = {(2, 1): "space.ranks=0", (8, 1): "space.ranks=0,2", (8, 2): "space.ranks=0,8,2", (1, 4): "space.ranks=0"}
    for (gpus, nodes), words in groups.items():
        sweep = plan_sweeps(target(gpus, nodes), "run", tmp_path, [])["collectives"]
        assert {words, "gpus=all"} <= {*sweep.words} and sweep.folder == tmp_path / "sweeps/run-collectives"


@pytest.mark.parametrize("name", GPU_WORDS)
def test_the_sweeps_of_a_gpu_are_valid(name: str, run_cli: object, tmp_path: Path) -> None:
    sweep = plan_sweeps(target(8), "run", tmp_path, ["hardware=h200"])[name]
    words = [{"gpus=all": "gpus=8"}.get(word, word) for word in sweep.words]
    result: CommandResult = run_cli(*words, "plan=true")
    assert result.code == 0, result.err
    assert "sampler grid" in result.out


def test_a_calibration_that_was_interrupted_goes_on_and_a_finished_one_begins_anew(tmp_path: Path) -> None:
    unfinished = tmp_path / "h200.unfinished"
    name = begin_or_resume(unfinished, "h200")
    assert name.startswith("calibration-h200-2") and begin_or_resume(unfinished, "h200") == name
    unfinished.write_text("calibration-h200-20260101-000000\n")
    assert begin_or_resume(unfinished, "h200") == "calibration-h200-20260101-000000"


def test_a_rerun_measures_again_what_has_no_result(tmp_path: Path) -> None:
    """A trial that failed, as on a busy processor, and was measured again is not retried once more."""
    folder = tmp_path / "sweeps" / "run-memory"
    folder.mkdir(parents=True)
    study = open_study(folder)
    study.tell(finished(ask_trial(study)))
    failed = ask_trial(study)
    study.tell(finished(failed, TrialStatus.FAILED))
    sweeps = plan_sweeps(target(), "run", tmp_path, [])
    assert {name: sweep.words[-1] for name, sweep in sweeps.items() if "retry" in sweep.words[-1]} == {
        "memory": "retry=failed"
    }
    study.tell(finished(ask_trial(study), TrialStatus.LOST))
    assert plan_sweeps(target(), "run", tmp_path, [])["memory"].words[-1] == "retry=all"
    again = open_study(folder, retry=(TrialStatus.FAILED, TrialStatus.LOST))
    for _ in range(2):
        again.tell(replace(finished(trial := ask_trial(again)), retry=trial.retry))
    assert not plan_sweeps(target(), "run", tmp_path, [])["memory"].without_result


def test_the_files_are_those_that_plans_read_and_the_table_says_what_they_replace(tmp_path: Path) -> None:
    path = tmp_path / "calibration" / "h200.yaml"
    path.parent.mkdir()
    rows = {
        "matmul": [*product_rows(), *product_rows("fp8_tensorwise", 1250)],
        "memory": copy_rows(),
        "attention": attention_rows("cudnn", 560, 480),
        "collectives": collective_rows({0: 360.0, 2: 340.0}, 8),
    }
    replacements = write_files(path, target(8), rows)
    file = find_calibration("auto", tmp_path, "h200")
    assert file is not None
    cluster = build_cluster("h200", None, 8, file)
    assert cluster.device.sustained_tflops == pytest.approx({"bf16": 600.0, "fp8": 1250.0})
    assert cluster.device.copy_gb_s == 4100 and cluster.topology.link_gb_s == pytest.approx(360 / 0.78, rel=1e-3)
    assert yaml.safe_load(file.topology_path.read_text())["source"].startswith("links of 8 x ")
    console = Console(width=160, record=True)
    console.print(draw_replacements(replacements))
    text = " ".join(console.export_text().split())
    assert "products in bf16, TFLOP/s 690 table 600 594 606 -13.0" in text
    assert "short over lasting products 1.15 table 1.2 +4.3" in text
    assert "copies, GB/s 4,080 0.85 of the data sheet 4,100 4,090 4,110 +0.5" in text
    assert "all-gather of 8 GPUs, bus GB/s 351 0.78 of 450 360 +2.6" in text
    assert "attention cudnn forward, 16,384 tokens, TFLOP/s 578.9 table 533.9 -7.8" in text


def test_a_busy_processor_has_no_headroom_of_power(tmp_path: Path) -> None:
    path = tmp_path / "calibration" / "cpu.yaml"
    path.parent.mkdir()
    processor = replace(target(), hardware=Hardware("cpu", kind="cpu"))
    write_files(path, processor, {"matmul": product_rows(sustained=20.0, burst=600.0), "memory": [], "attention": []})
    assert read_calibration(path).power_headroom == 1.0


def calibrate(*words: str) -> str:
    """Return what the command prints; the test's own timeout ends it."""
    command = [sys.executable, "-m", "sweeper", "calibrate", *words]
    result = subprocess.run(command, capture_output=True, text=True, env=environment())
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_processor_is_calibrated_from_end_to_end(tmp_path: Path) -> None:
    printed = calibrate("hardware=cpu", f"dir={tmp_path}")
    assert "products in fp32, TFLOP/s" in printed and "written" in printed
    file = find_calibration("auto", tmp_path, "cpu")
    assert file is not None and file.rates.sustained_tflops["fp32"].value > 0
    assert yaml.safe_load((tmp_path / "calibration/cpu_topology.yaml").read_text())["gpus_per_domain"] == 2
    assert not (tmp_path / "calibration/cpu.unfinished").exists()


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_the_gpus_that_are_here_are_calibrated_and_sustain_less_than_a_short_run_reaches(tmp_path: Path) -> None:
    calibrate(f"dir={tmp_path}")
    path = next(path for path in (tmp_path / "calibration").glob("*.yaml") if not path.stem.endswith("_topology"))
    rates = read_calibration(path)
    assert 1.0 <= rates.power_headroom < 1.5 and rates.copy_gb_s is not None and rates.attention
    for figure in rates.sustained_tflops.values():
        assert figure.low is not None and figure.high is not None and figure.low <= figure.value <= figure.high
