"""Measured rates in a file: what plans take from it, and what is refused of it."""

from pathlib import Path

import pytest

from sweeper.commands.plan.answer import answer
from sweeper.commands.plan.request import read_request
from sweeper.commands.plan.text import show
from sweeper.config.catalogue import catalogue, find_hardware
from sweeper.preflight.calibration import (
    Calibration,
    CalibrationFile,
    Figure,
    device_key,
    find_calibration,
    write_calibration,
)
from sweeper.preflight.clusters import build_cluster
from tests.conftest import CommandResult
from workloads.api.errors import UserInputError
from workloads.hardware.cluster import AttentionRates

WORDS = ["model=llama3_8b", "hardware=h200", "gpus=8", "micro_batch=1", "cp=1", "pp=1"]
SLOW = Calibration(
    hardware="h200",
    device="NVIDIA H200",
    date="2026-11-23",
    torch="2.13.0",
    conditions="products back to back for 2 s",
    sustained_tflops={"bf16": Figure(345.0, 340.0, 350.0)},
    power_headroom=1.1,
    copy_gb_s=Figure(2000.0),
    attention={"cudnn": AttentionRates(0.5, 0.4, 700.0)},
)


def write(folder: Path, calibration: Calibration = SLOW, topology: str = "") -> CalibrationFile:
    path = folder / "calibration" / f"{calibration.hardware}.yaml"
    path.parent.mkdir(exist_ok=True)
    write_calibration(path, calibration)
    file = CalibrationFile(path, calibration)
    if topology:
        file.topology_path.write_text(topology)
    return file


def test_a_file_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    assert find_calibration("auto", tmp_path, "h200") is None
    file = write(tmp_path)
    assert find_calibration("auto", tmp_path, "h200") == file
    assert find_calibration(str(file.path), Path("elsewhere"), "h200") == file
    assert find_calibration(str(file.path.parent), Path("elsewhere"), "h200") == file
    assert find_calibration("none", tmp_path, "h200") is None
    assert find_calibration("auto", tmp_path, "h100") is None


def test_a_cluster_has_the_measured_rates_and_links(tmp_path: Path) -> None:
    links = "gpus_per_domain: 4\nwiring: host\nlink_gb_s: 40\nnetwork_gb_s: 12\nsource: measured\n"
    file = write(tmp_path, topology=links)
    cluster = build_cluster("h200", None, 8, file)
    assert cluster.device.sustained_tflops == {"bf16": 345.0, "fp8": 1300.0}
    assert (cluster.device.copy_gb_s, cluster.device.power_headroom) == (2000.0, 1.1)
    assert (cluster.topology.gpus_per_domain, cluster.topology.link_gb_s) == (4, 40)
    assert build_cluster("h200", "h200_400g", 8, file).topology.link_gb_s == 450


def test_a_plan_rests_on_measured_rates_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    tables = answer(read_request(WORDS))
    write(tmp_path)
    measured = answer(read_request(WORDS))
    assert measured.best.estimate.step.total_s > 1.5 * tables.best.estimate.step.total_s
    assert answer(read_request([*WORDS, "calibration=none"])).best.estimate == tables.best.estimate
    show(measured)
    out = capsys.readouterr().out
    rates = "measured on NVIDIA H200, 2026-11-23: products in bf16, copies, attention by cudnn (calibration/h200.yaml)"
    assert f"rates     {rates}" in out
    assert "unsure    the band is that of estimates with the tables' rates" in out
    show(tables)
    assert "measured on" not in capsys.readouterr().out


def test_estimates_of_a_sweep_rest_on_measured_rates_and_the_plan_says_so(run_cli: object, tmp_path: Path) -> None:
    def plan(*words: str) -> CommandResult:
        fixed = (
            "space.micro_batch=1",
            "space.dp_replicate=1",
            "space.dp_shard=8",
            "space.checkpointing=none",
            "gpus=8",
        )
        return run_cli("workload=parallel", "hardware=h200", f"dir={tmp_path}", "plan=true", *fixed, *words)

    write(tmp_path)
    measured, without = plan(), plan("calibration=none")
    assert without.code == measured.code == 0, measured.err
    assert "rates    measured on NVIDIA H200, 2026-11-23: products in bf16" in measured.out
    assert "measured on" not in without.out

    def best_rate(result: CommandResult) -> float:
        line = next(line for line in result.out.splitlines() if line.strip().startswith("1 "))
        return max(float(word.replace(",", "")) for word in line.split() if word.replace(",", "").isdigit())

    assert best_rate(measured) < 0.7 * best_rate(without)


def test_a_part_of_a_gpu_has_rates_of_its_own() -> None:
    part = find_hardware("AMD Instinct MI300X CPX/NPS4")
    assert part is not None and device_key(part) == "mi300x_cpx_nps4"
    assert device_key(catalogue()["mi300x"]) == "mi300x"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no keys; write one with python -m sweeper calibrate"),
        ("hardware: h200\ndevice: x\n", "date: required"),
        ("hardware: h200\ndevice: x\ndate: 2026-11-23\ntflops: 3\n", "tflops: unknown key. .*Available"),
        (
            "hardware: h200\ndevice: x\ndate: a\nsustained_tflops: {bf16: 3}\n",
            "sustained_tflops.bf16=3: must be a mapping",
        ),
        (
            "hardware: h200\ndevice: x\ndate: a\nsustained_tflops: {bf16: {value: 0}}\n",
            "bf16.value=0.0: must be at least",
        ),
        ("hardware: h200\ndevice: x\ndate: a\npower_headroom: 9\n", "power_headroom=9.0: must be at most 3"),
        ("hardware: h100\ndevice: x\ndate: a\n", "was measured on h100, not on h200"),
        ("a: [", "cannot be read"),
    ],
)
def test_an_invalid_file_is_named_in_a_line(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "h200.yaml"
    path.write_text(text)
    with pytest.raises(UserInputError, match=message) as caught:
        find_calibration(str(path), tmp_path, "h200")
    assert "h200.yaml" in str(caught.value) and "\n" not in str(caught.value)


def test_a_path_without_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserInputError, match=r"calibration=.*h200.yaml: cannot be read"):
        find_calibration(str(tmp_path), tmp_path, "h200")
