"""`python -m sweeper calibrate`: its words, sweeps, files and rates, and a processor calibrated from end to end."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from sweeper.commands.calibrate import rates
from sweeper.commands.calibrate.main import (
    COMMAND,
    CalibrateRequest,
    begin_or_resume,
    find_target,
    find_use,
    write_files,
)
from sweeper.commands.calibrate.rates import measured_topology
from sweeper.commands.calibrate.sweeps import WORDS, plan_sweeps
from sweeper.commands.sweep.free_cores import CoreWatch
from sweeper.common.trials import TrialStatus
from sweeper.config.catalogue import catalogue
from sweeper.config.hardware import Node, Target
from sweeper.config.schema import Hardware
from sweeper.preflight.calibration import Calibration, Figure, calibrate_device, find_calibration, read_calibration
from sweeper.preflight.clusters import build_cluster
from sweeper.preflight.devices import planned_target
from tests.conftest import CommandResult, environment
from tests.support.calibrations import (
    attention_rows,
    collective_rows,
    copy_rows,
    grouped_rows,
    launch_rows,
    product_rows,
)
from tests.support.planner import H100
from tests.support.studies import ask_trial, finished, open_study
from workloads.api.errors import UserInputError
from workloads.estimator.communication import Group, all_gather_s, latency_s
from workloads.estimator.operations import attention_rates
from workloads.hardware.cluster import Cluster, Topology


def target(gpus: int = 1, nodes: int = 1, hardware: str = "h200") -> Target:
    planned = planned_target(catalogue()[hardware], gpus)
    return replace(planned, nodes=(replace(planned.nodes[0], gpus=gpus),) * nodes)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["hardwre=h200"], r"hardwre: unknown key. Did you mean hardware\? Available: "),
        (["h200"], r"h200: not of the form key=value. Did you mean hardware=h200\?"),
        (["dir="], "dir=: has no value"),
    ],
)
def test_an_unknown_word_is_named(words: list[str], message: str) -> None:
    with pytest.raises(UserInputError, match=message):
        COMMAND.run(words)


def test_an_unknown_device_is_named() -> None:
    with pytest.raises(UserInputError, match=r"hardware=h2000: unknown hardware. Did you mean h200\? Available: "):
        find_target(CalibrateRequest(hardware="h2000"))


def test_collectives_are_measured_between_gpus_only_and_over_groups_with_different_links(tmp_path: Path) -> None:
    assert list(plan_sweeps(target(), "run", tmp_path, [])) == ["matmul", "grouped", "launch", "memory", "attention"]
    groups = {(2, 1): "space.ranks=0", (8, 1): "space.ranks=0,2", (8, 2): "space.ranks=0,8,2", (1, 4): "space.ranks=0"}
    for (gpus, nodes), words in groups.items():
        sweep = plan_sweeps(target(gpus, nodes), "run", tmp_path, [])["collectives"]
        assert {words, "gpus=all"} <= {*sweep.words} and sweep.folder == tmp_path / "sweeps/run-collectives"


@pytest.mark.parametrize("name", WORDS["gpu"])
def test_the_sweeps_of_a_gpu_are_valid(name: str, run_cli: object, tmp_path: Path) -> None:
    sweep = plan_sweeps(target(8), "run", tmp_path, ["hardware=h200"])[name]
    words = [{"gpus=all": "gpus=8"}.get(word, word) for word in sweep.words]
    result: CommandResult = run_cli(*words, "plan=true")
    assert result.code == 0, result.err
    assert "sampler grid" in result.out


def test_a_calibration_that_was_interrupted_goes_on_and_a_finished_one_begins_anew(tmp_path: Path) -> None:
    unfinished = tmp_path / "h200.unfinished"
    unfinished.touch()
    name, _ = begun = begin_or_resume(unfinished, "h200", [])
    assert name.startswith("calibration-h200-2") and begin_or_resume(unfinished, "h200", []) == begun == (name, "")
    for use in (["GPU 1 is in use"], []):
        assert begin_or_resume(unfinished, "h200", use) == (name, "GPU 1 is in use")


def test_processes_that_use_the_cores_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    processor = Target(Hardware("cpu", kind="cpu"), "Laptop", (Node("this machine", cpus=4, cpu_name="Laptop"),))
    monkeypatch.setattr(CoreWatch, "find_use", lambda _: (0.0, ""))
    assert find_use(processor) == []
    monkeypatch.setattr(CoreWatch, "find_use", lambda _: (1.2, "gcc (pid 7)"))
    assert find_use(processor) == ["other processes use 1.2 of 4 cores, most of it gcc (pid 7)"]


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
        "grouped": [*grouped_rows(550, 580, 570), *grouped_rows(1100, dtype="fp8_rowwise")],
        "launch": launch_rows(tflops=0.1 / 3),
        "memory": [*copy_rows(), *copy_rows(3500.0, "update")],
        "attention": attention_rows("cudnn", 560, 480),
        "collectives": collective_rows({0: 360.0, 2: 340.0}, 8),
    }
    replacements = write_files(path, target(8), rows, "other processes use 3.0 GiB of GPU 1")
    file = find_calibration("auto", tmp_path, "h200")
    assert file is not None
    assert file.rates.busy == "other processes use 3.0 GiB of GPU 1"
    assert f"{file.rates.date}, while other processes used it: products in bf16" in file.describe()
    cluster = build_cluster("h200", None, 8, file)
    assert cluster.device.sustained_tflops == pytest.approx({"bf16": 600.0, "fp8": 1250.0})
    assert cluster.device.grouped_tflops == {"bf16": 570, "fp8": 1100}
    assert cluster.device.update_gb_s == 3500
    assert cluster.device.launch_us == pytest.approx(3 * 2 * 64**3 / 0.1e12 * 1e6)
    assert cluster.device.copy_gb_s == 4100 and cluster.topology.link_gb_s == pytest.approx(360 / 0.78, rel=1e-3)
    assert yaml.safe_load(file.topology_path.read_text())["source"].startswith("links of 8 x ")
    console = Console(width=160, record=True)
    console.print(rates.draw_replacements(replacements))
    text = " ".join(console.export_text().split())
    assert "products in bf16, TFLOP/s 690 table 600 594 606 -13.0" in text
    assert "short over lasting products 1.15 table 1.2 +4.3" in text
    assert "grouped products in bf16, TFLOP/s 534 0.89 of the products 570 +6.7" in text
    assert "grouped products in fp8, TFLOP/s 849.7 0.89 of the products and traffic 1,100 +29.5" in text
    assert "AdamW's update, GB/s 4,080 0.85 of the data sheet 3,500" in text
    assert "time between launches, µs 15 table 15.73 15.42 16.05 +4.9" in text
    assert "copies, GB/s 4,080 0.85 of the data sheet 4,100 4,090 4,110 +0.5" in text
    assert "all-gather of 8 GPUs, bus GB/s 351 0.78 of 450 360 +2.6" in text
    assert "attention cudnn forward, 16,384 tokens, TFLOP/s 578.9 table 533.9 -7.8" in text


EMPTY: dict[str, list[dict[str, str]]] = {"grouped": [], "memory": [], "attention": []}


def test_a_busy_processor_has_no_headroom_of_power(tmp_path: Path) -> None:
    path = tmp_path / "calibration" / "cpu.yaml"
    path.parent.mkdir()
    processor = replace(target(), hardware=Hardware("cpu", kind="cpu"))
    write_files(path, processor, {"matmul": product_rows(sustained=20.0, burst=600.0)} | EMPTY)
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


ASSUMED = Topology("nodes of 8", 8, "switch", link_gb_s=450, network_gb_s=50)


def test_the_rate_of_products_is_all_operations_over_all_time() -> None:
    rows = product_rows()
    rows[0]["tflops_sustained"] = "300"  # the smallest of the three takes twice as long
    operations = [2 * m * n * k for m, n, k in ((8192, 6144, 4096), (8192, 28672, 4096), (8192, 4096, 14336))]
    seconds = operations[0] / 300 + (operations[1] + operations[2]) / 600
    tflops = rates.sustained_tflops([*rows, *product_rows("fp8_tensorwise", 1300)])
    assert tflops["bf16"].value == pytest.approx(sum(operations) / seconds)
    assert tflops["fp8"] == Figure(pytest.approx(1300), pytest.approx(1294), pytest.approx(1306))


def test_a_rate_without_an_interval_has_none() -> None:
    rows = product_rows()
    rows[1]["tflops_sustained_ci_low"] = ""
    rate = rates.sustained_tflops(rows)["bf16"]
    assert rate.low is None and rate.high is not None


def test_short_products_are_faster_by_the_headroom_of_bf16() -> None:
    assert rates.power_headroom([*product_rows(), *product_rows("fp8_tensorwise", 1300, 1400)]) == pytest.approx(1.2)
    assert rates.power_headroom(product_rows(burst=590)) == 1.0  # never slower


def test_the_planner_gives_attention_its_measured_rate_at_both_lengths() -> None:
    rows = [*attention_rows("cudnn", 620, 540), *attention_rows("flash4", 650, 560, 1200)]
    attention = rates.attention_rates(rows, 600.0, 1.2)
    calibration = Calibration("h100", "H100", "2026-11-23", sustained_tflops={"bf16": Figure(600)}, attention=attention)
    device = calibrate_device(H100, calibration)
    for row in rows:
        kernel = {"cudnn": "cudnn", "flash4": "flash3"}[row["param.kernel"]]
        fitted, length = attention_rates(device, kernel), float(row["param.sequence_length"])
        share = fitted.forward_share if row["param.mode"] == "forward" else fitted.backward_share
        rate = device.sustained_tflops["bf16"] * share * length / (length + fitted.half_tokens)
        assert rate == pytest.approx(float(row["tflops_sustained"]), rel=1e-3)


def test_of_kernels_with_one_name_the_fastest_counts_and_one_length_gives_no_rate() -> None:
    rows = [*attention_rows("aotriton", 300, 200), *attention_rows("ck", 400, 250)]
    assert rates.attention_rates(rows, 500.0, 1.2)["flash2"].forward_share == pytest.approx(0.8, rel=1e-3)
    assert rates.attention_rates(attention_rows("cudnn", 600, 500)[::2], 600.0, 1.2) == {}
    forward = [row for row in attention_rows("cudnn", 600, 500) if row["param.mode"] == "forward"]
    assert rates.attention_rates(forward, 600.0, 1.2) == {}


def test_short_calls_that_wait_for_their_launches_have_the_rate_of_single_calls_under_the_power_cap() -> None:
    rows = attention_rows("flash4", 650, 560)
    expected = rates.attention_rates(rows, 600.0, 1.2)
    for row in rows[::2]:  # the short sequence of each pass
        row["tflops_sustained"] = str(float(row["tflops_sustained"]) / 3)
    assert rates.attention_rates(rows, 600.0, 1.2) == expected
    assert rates.attention_rates(rows, 600.0, 3.6) != expected


def test_the_conditions_name_seconds_clock_and_power() -> None:
    assert rates.describe_conditions(product_rows()) == (
        "products back to back for 2 s, after 1.4 to 1.4 s in which the clocks settled, 1440 to 1440 MHz, 700 to 700 W"
    )


def test_the_planner_s_all_gather_takes_the_measured_time_within_a_node_and_across() -> None:
    rows = collective_rows({0: 180.0, 8: 360.0, 2: 340.0}, 16)
    topology = measured_topology(rows, ASSUMED, gpus=16, per_node=8)
    assert (topology.gpus_per_domain, topology.wiring) == (8, "switch")
    cluster = Cluster(H100, topology, 16)
    for ranks, bus in ((8, 360e9), (16, 180e9)):
        moving_s = all_gather_s(cluster, Group(ranks), 2**30) - latency_s(cluster, Group(ranks))
        assert moving_s == pytest.approx(2**30 * (ranks - 1) / ranks / bus, rel=1e-3)
    assert 7 * topology.link_latency_s == pytest.approx(28e-6, rel=1e-3)


def test_links_between_pairs_are_told_by_the_bandwidth_of_two() -> None:
    rows = collective_rows({0: 320.0, 2: 48.0}, 8)
    assert measured_topology(rows, ASSUMED, gpus=8, per_node=8).wiring == "pairs"


def test_what_was_not_measured_is_as_assumed() -> None:
    topology = measured_topology(collective_rows({0: 360.0}, 8), ASSUMED, gpus=8, per_node=8)
    assert topology.network_gb_s == 50 and topology.network_latency_s == ASSUMED.network_latency_s
    single = measured_topology([], replace(ASSUMED, oversubscription=2.0), gpus=2, per_node=1)
    assert (single.link_gb_s, single.network_gb_s, single.oversubscription) == (450, 50, 2.0)
