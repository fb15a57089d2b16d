"""The planner's score on published runs, and rows that it cannot express."""

import csv
import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest

from benchmarks.planner import RECENT_ROWS, ROWS, SCORED, main, pairs_in_order, read_runs, score_all, summarize
from benchmarks.planner_calibration import calibrate
from benchmarks.planner_rows import read_run
from workloads.estimator import operations, placed_job, step
from workloads.estimator.pipeline import stage_layers
from workloads.estimator.step import POWER_EXPONENT, estimate_job
from workloads.layouts.trainers import efficiencies, nearest_efficiency

DEVICE_RATES = Path(operations.__file__).parents[1] / "hardware/device_rates.csv"


@pytest.fixture(scope="module")
def scores() -> list[Any]:
    runs, unsupported = read_runs(ROWS)
    assert not unsupported
    return score_all(runs, efficiencies())


@pytest.mark.parametrize(("family", "mape", "median"), [("dense", 4, 3), ("moe", 15, 15), ("memory", 8, 4)])
def test_the_score_holds(scores: list[Any], family: str, mape: float, median: float) -> None:
    summary = summarize(scores)[family]
    assert summary["mape"] <= mape and summary["median"] <= median


def test_no_row_is_beyond_a_quarter(scores: list[Any]) -> None:
    assert not [score.run.name for score in scores if abs(score.error_percent) > 25]


def test_memory_is_a_bound_that_no_measured_row_exceeds() -> None:
    scores = [score for path in SCORED for score in score_all(read_runs(path)[0], efficiencies())]
    errors = [score.error_percent for score in scores if score.family == "memory"]
    assert len(errors) >= 43 and min(errors) >= 0 and statistics.median(errors) <= 6


def test_layouts_are_in_the_right_order(scores: list[Any]) -> None:
    order = pairs_in_order(scores)
    assert order["dense"]["pairs"] >= 20 and order["dense"]["percent"] >= 90
    assert order["memory"]["percent"] >= 90


def test_later_runs_whose_times_nothing_was_fitted_to_are_within_the_published_errors() -> None:
    scores = score_all(read_runs(ROWS.with_name("planner_rows_h200_fp32.csv"))[0], efficiencies())
    summary, order = summarize(scores), pairs_in_order(scores)
    assert summary["dense"]["rows"] == 35 and summary["dense"]["mape"] <= 5
    assert summary["memory"]["rows"] == 37 and summary["memory"]["mape"] <= 6
    assert order["dense"]["percent"] == order["memory"]["percent"] == 100


def test_rates_of_the_h100_at_500_w_are_what_their_source_says() -> None:
    rates = {(row["device"], row["dtype"]): row for row in csv.DictReader(DEVICE_RATES.open())}
    exponent = math.log(690 / 488) / math.log(700 / 400)  # the H200 at 700 W, the H100 NVL at 400 W
    for dtype in ("bf16", "fp8"):
        row = rates["h100_96gb", dtype]
        expected = float(rates["h100", dtype]["tflops"]) * (500 / 700) ** exponent
        assert float(row["tflops"]) == pytest.approx(expected, rel=2e-3) and f"^{exponent:.2f}" in row["statistic"]
    assert pytest.approx(exponent, abs=0.005) == POWER_EXPONENT


def test_the_neutral_score_knows_nothing_of_the_rows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["--json"])
    printed = json.loads(capsys.readouterr().out)
    for name, value in (("EAGER_FACTOR", 1), ("ROUTING_S", 0), ("LAUNCHES_S", 0)):
        monkeypatch.setattr(operations, name, value)
    monkeypatch.setattr(placed_job, "HOST_GB_S", 600)
    monkeypatch.setattr(step, "IDLE_POWER_SHARE", 0)
    monkeypatch.setattr(step, "STEP_OVERHEAD_S", 0)
    monkeypatch.setattr(operations, "_BLOCK_SECONDS", {})
    runs = [run for run in read_runs(ROWS)[0] if run.step_s]
    errors = []
    for run in runs:
        if run.family == "dense":
            table = calibrate(other for other in runs if other.source != run.source)
            efficiency = nearest_efficiency(*run.pair, table)
            errors.append(abs(estimate_job(run.job, run.cluster, efficiency).step.total_s / run.step_s - 1))
    dense = printed["neutral"]["families"]["dense"]
    assert dense["mape"] == pytest.approx(100 * sum(errors) / len(errors), abs=0.01)
    assert dense["mape"] > printed["leave_one_source_out"]["families"]["dense"]["mape"] + 2
    assert dense["mape_95"][0] < dense["mape"] < dense["mape_95"][1]


def test_the_efficiencies_are_those_of_the_rows() -> None:
    assert calibrate(read_runs(ROWS)[0]) == pytest.approx(efficiencies(), abs=0.005)


def test_rates_in_tflops_count_what_megatron_counts() -> None:
    """Rows that give tokens/s and TFLOP/s have the same step time by either."""
    compared = 0
    for run in (run for path in SCORED for run in read_runs(path)[0]):
        is_megatron = run.pair[0] in ("megatron-bridge", "megatron-core", "primus") and "qwen3" in run.row["model_key"]
        if is_megatron and run.row["tokens_per_s_per_gpu"] and run.row["tflops_per_gpu"]:
            other = read_run(dict(run.row) | {"tokens_per_s_per_gpu": "", "step_s": ""})
            assert other.step_s == pytest.approx(run.step_s, rel=0.012)
            compared += 1
    assert compared >= 20


@pytest.mark.parametrize(
    ("trainer", "stages", "ends"),
    [("megatron-bridge", 16, (4, 1)), ("megatron-bridge", 32, (1, 0)), ("nemo", 16, (3, 2)), ("nemo", 4, (15, 14))],
)
def test_the_last_stage_of_deepseek_v3_has_as_many_layers_as_in_the_recipe(
    trainer: str, stages: int, ends: tuple[int, int]
) -> None:
    row = _row(
        model_key="deepseek_v3", framework=trainer, tp="1", cp="1", ep="1", gpus="256", dp="", recompute_key="none"
    )
    vpp = 4 if stages == 32 else 1
    run = read_run(row | {"pp": str(stages // vpp), "vpp": str(vpp), "global_batch": "4096", "micro_batch": "1"})
    sizes = [len(stage) for stage in stage_layers(61, stages, *run.job.layout.less_layers)]
    assert (sizes[0], sizes[-1]) == ends and set(sizes[1:-1]) == {-(-61 // stages)}


def test_recipes_of_the_dgx_cloud_set_what_their_rows_do_not_say() -> None:
    runs = [run for run in read_runs(RECENT_ROWS)[0] if "DGX Cloud" in run.source and run.family == "moe"]
    found = {(run.row["model_key"], run.cluster.device.name): run.job for run in runs}
    assert all(job.expert_capacity for job in found.values())
    assert found["grok1_314b", "gb200"].layout.cuda_graph and not found["deepseek_v3_671b", "gb200"].layout.cuda_graph
    assert found["deepseek_v3_671b", "gb200"].layout.checkpointing == "core_attention"


def _row(**changes: str) -> dict[str, str]:
    with ROWS.open(newline="") as lines:
        return next(csv.DictReader(lines)) | changes


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_key": "kimi_linear_48b_a3b"}, "linear attention"),
        ({"model_key": "bamba_9b"}, "Mamba-2"),
        ({"model_key": "llama9"}, "unknown model"),
        ({"framework": "mytrainer"}, "unknown framework"),
        ({"hardware_key": "h1000"}, "unknown hardware"),
        ({"cluster_key": "moon"}, "unknown topology"),
        ({"precision_key": "nvfp4"}, "no matrix units for fp4"),
        ({"precision_key": "int1"}, "unknown precision"),
        ({"sharding_key": "zero9"}, "unknown sharding"),
        ({"recompute_key": "some"}, "unknown recomputation"),
        ({"gpus": "9", "tp": "2"}, "does not divide 9 GPUs"),
        ({"gpus": "nan"}, "not a number above 0"),
        ({"step_s": "0"}, "not a number above 0"),
        ({"global_batch": "15"}, "not a multiple"),
        ({"seq_len": "long"}, "not a number"),
        ({"tokens_per_s_per_gpu": "", "memory_gib": ""}, "nothing was measured"),
        ({"ep": "8"}, "does not divide 0 experts"),
    ],
)
def test_a_row_that_is_not_modelled_is_listed_with_its_reason(
    changes: dict[str, str], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = _row(**changes)
    path = tmp_path / "rows.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(row))
        writer.writeheader()
        writer.writerow(row)
    runs, unsupported = read_runs(path)
    assert not runs and reason in unsupported[0]["reason"]


@pytest.mark.parametrize("key", ["none", "ddp", "zero1", "zero2", "zero3", "fsdp1", "hsdp", "megatron_fsdp"])
def test_every_sharding_is_read(key: str, tmp_path: Path) -> None:
    row = _row(sharding_key=key)
    path = tmp_path / "rows.csv"
    path.write_text(",".join(row) + "\n" + ",".join(f'"{value}"' for value in row.values()) + "\n")
    runs, unsupported = read_runs(path)
    assert not unsupported and score_all(runs, efficiencies())


def test_the_program_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--json"])
    result = json.loads(capsys.readouterr().out)
    assert set(result["families"]) == {"dense", "moe", "memory"}
    assert result["families"]["dense"]["rows"] == 35 and result["unsupported"] == []
    left_out = result["leave_one_source_out"]["families"]
    assert left_out["dense"]["mape"] <= 10
