"""Tests of importing tprimat's benchmarks."""

import json
from pathlib import Path
from typing import Any

import pytest

from sweeper.commands.ingest.imported import ImportedResult, derive_metrics, find_contradictions
from sweeper.commands.ingest.readers import read_tprimat
from tests.support.imports import tprimat_benchmark
from workloads.api.errors import UserInputError


def read(folder: Path, content: dict[str, Any]) -> ImportedResult:
    (path := folder / "run.json").write_text(json.dumps(content))
    (result,) = read_tprimat(path)
    return result


def test_metrics_are_derived_from_the_steps_after_warm_up(tmp_path: Path) -> None:
    result = read(tmp_path, tprimat_benchmark())
    assert result.params == {"sequence_length": 2048, "global_batch": 64, "tp": 2, "pp": 1, "dp": 4}
    derived = derive_metrics(result)
    assert derived["tokens_per_s"] == 64 * 2048 / 2 and derived["tokens_per_s_per_gpu"] == 8192
    assert derived["warmup_steps"] == 2
    assert find_contradictions(result, derived) == []


def test_memory_is_read_as_decimal_gigabytes(tmp_path: Path) -> None:
    result = read(tmp_path, tprimat_benchmark(memory_metrics={"peak_memory_allocated_gb": 64.424509440}))
    assert result.metrics == {"peak_memory_gib": pytest.approx(60)}


def test_step_times_of_the_older_schema_are_read(tmp_path: Path) -> None:
    content = tprimat_benchmark()
    content["raw_step_times"] = content.pop("step_times")
    assert len(read(tmp_path, content).step_times_s) == 32


def test_contradictions_within_a_file_are_reported(tmp_path: Path) -> None:
    content = tprimat_benchmark()
    content["training_config"] |= {"parallel_strategy": "other", "num_gpus": 16}
    content["performance_metrics"] |= {"total_steps": 10, "tokens_per_second": 262144.0}
    result = read(tmp_path, content)
    assert result.contradictions == (
        "the strategy has two names: balanced and other",
        "total_steps is 10, but there are 32 step times",
        "the parallel degrees 2 x 1 x 4 do not give 16 GPUs",
    )
    # The mean of the steps after the first is (4 + 30 x 2) / 31 s.
    message = "claimed tokens_per_s 262,144, but the mean of the same steps gives 63,488"
    assert find_contradictions(result, derive_metrics(result))[3:] == [
        f"{message} (a sequence length of 8,192 tokens would explain it)"
    ]


def test_a_strategy_that_is_unknown_contradicts_nothing(tmp_path: Path) -> None:
    content = tprimat_benchmark()
    content["parallelism_config"] |= {"strategy_name": "unknown"}
    assert read(tmp_path, content).contradictions == ()


def test_a_mean_is_compared_with_the_mean_of_the_same_steps(tmp_path: Path) -> None:
    """The median of these steps is 2 s, the mean of those after the first 2.45 s, as the file says."""
    content = tprimat_benchmark(step_times=[30.0, *[2.0] * 15, *[3.0] * 5, *[3.8] * 5])
    mean_s = (15 * 2.0 + 5 * 3.0 + 5 * 3.8) / 25
    tokens_per_s = 64 * 2048 / mean_s
    content["performance_metrics"] = {"avg_step_time_seconds": mean_s, "tokens_per_second": tokens_per_s}
    result = read(tmp_path, content)
    derived = derive_metrics(result)
    assert derived["tokens_per_s"] > 1.2 * tokens_per_s
    assert find_contradictions(result, derived) == []


def test_a_wrong_claim_and_its_value_per_gpu_are_reported_once(tmp_path: Path) -> None:
    content = tprimat_benchmark()
    content["performance_metrics"] |= {"tokens_per_second": 70000.0, "tokens_per_second_per_gpu": 8750.0}
    result = read(tmp_path, content)
    message = "claimed tokens_per_s 70,000, but the mean of the same steps gives 63,488"
    assert find_contradictions(result, derive_metrics(result)) == [message]  # no sequence length explains 10%
    content["performance_metrics"] |= {"tokens_per_second_per_gpu": 4375.0}  # of twice the GPUs: another claim
    result = read(tmp_path, content)
    assert len(find_contradictions(result, derive_metrics(result))) == 2


@pytest.mark.parametrize("times", [[1, -2], [], [True], 3, None, ["1"], [10**400, 2], [float("inf")]])
def test_a_file_without_step_times_is_refused_in_a_line(tmp_path: Path, times: object) -> None:
    with pytest.raises(UserInputError, match=r"run\.json: has no list of positive step times") as error:
        read(tmp_path, tprimat_benchmark(step_times=times))
    assert "\n" not in str(error.value)


def test_numbers_beyond_any_machine_stay_unknown(tmp_path: Path) -> None:
    content = tprimat_benchmark()
    content["training_config"] |= {"global_batch_size": 10**400, "num_gpus": 10**9}
    content["performance_metrics"] |= {"tokens_per_second": 10**400}
    result = read(tmp_path, content)
    assert result.tokens_per_step == 0 and result.devices is None and "tokens_per_s" not in result.claims.values
