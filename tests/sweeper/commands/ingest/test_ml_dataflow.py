"""Tests of importing ml_dataflow's results."""

from pathlib import Path

import pytest

from sweeper.commands.ingest.imported import ImportedResult, add_device, derive_metrics, find_contradictions
from sweeper.commands.ingest.readers import COLUMNS, OLDER_COLUMNS, read_ml_dataflow
from tests.support.imports import TFLOPS, TOKENS_PER_S, ml_dataflow_csv


def read(folder: Path, text: str, name: str = "h100.csv") -> list[ImportedResult]:
    (path := folder / name).write_text(text)
    return [add_device(result, path, "") for result in read_ml_dataflow(path)]


@pytest.mark.parametrize("columns", [COLUMNS, OLDER_COLUMNS])
def test_lines_are_read_with_and_without_the_columns_of_used_memory(tmp_path: Path, columns: list[str]) -> None:
    text = ml_dataflow_csv({}, {"step_s": 0.0}, {"tokens_per_s": 1e5}, columns=columns)
    feasible, infeasible, wrong_claim = read(tmp_path, text)
    derived = derive_metrics(feasible)
    assert feasible.feasible and derived["tokens_per_s"] == pytest.approx(TOKENS_PER_S)
    assert find_contradictions(feasible, derived) == []
    assert not infeasible.feasible and not derive_metrics(infeasible) and not infeasible.claims.values
    assert find_contradictions(infeasible, {}) == []
    assert find_contradictions(wrong_claim, derive_metrics(wrong_claim)) == [
        "claimed tokens_per_s 100,000, but the median of the same steps gives 11,141"
    ]
    memory = {"peak_host_gib": 60.5, "peak_device_gib": 38.25} if columns is COLUMNS else {}
    assert feasible.metrics == memory and infeasible.metrics == {}


def test_a_model_of_the_catalogue_has_an_mfu(tmp_path: Path) -> None:
    named, unknown, wrong = read(tmp_path, ml_dataflow_csv({}, {"model_b": 15}, {"tflops": 1.2 * TFLOPS}))
    assert named.params["model"] == "llama3_8b"
    derived = derive_metrics(named)
    assert derived["tflops"] == pytest.approx(TFLOPS) and derived["mfu"] == pytest.approx(TFLOPS / 989)
    assert "model" not in unknown.params and "mfu" not in derive_metrics(unknown)
    (message,) = find_contradictions(wrong, derive_metrics(wrong))
    assert message.startswith("claimed tflops 688.1, but the median of the same steps gives 573.4")


def test_results_that_no_device_reaches_are_contradicted(tmp_path: Path) -> None:
    fast, instant = read(tmp_path, ml_dataflow_csv({"step_s": 10.0}, {"step_s": 1e-300}))
    messages = find_contradictions(fast, derive_metrics(fast))
    assert any(message.startswith("impossible: mfu is 290% of the vendor's dense peak") for message in messages)
    assert derive_metrics(instant) == {}
    assert find_contradictions(instant, {}) == ["a step takes 1e-300 s: no step does"]


def test_a_number_is_kept_with_every_digit(tmp_path: Path) -> None:
    (result,) = read(tmp_path, ml_dataflow_csv({"sequence_length": 1048576, "chunk_tokens": 1234567.5}))
    assert result.params["sequence_length"] == 1048576 and result.params["chunk_tokens"] == 1234567.5
