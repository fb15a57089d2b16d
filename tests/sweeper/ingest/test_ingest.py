"""Tests of the import: the supported formats, the contradictions within a file, and the files that are refused."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mlflow import MlflowClient

from sweeper.common.errors import UserInputError
from sweeper.ingest.__main__ import import_file
from sweeper.ingest.derive import derive_metrics, drop_warmup, find_disagreements
from sweeper.ingest.formats import COLUMNS, OLDER_COLUMNS, detect_format
from sweeper.ingest.imported import ImportedResult
from tests.conftest import REPOSITORY
from tests.support.trainer_logs import MEGATRON, TITAN

# Files of other projects beside the checkout, where there are any.
REFERENCE = REPOSITORY.parent / "shared" / "reference"


def tprimat_benchmark(**changes: Any) -> dict[str, Any]:
    """Return a tprimat benchmark of the newer schema: 64 sequences of 2048 tokens in 2 s."""
    content: dict[str, Any] = {
        "platform": "nvd",
        "gpu_info": {"device_count": 8, "device_name": "NVIDIA H100 80GB HBM3"},
        "parallelism_config": {
            "strategy_name": "balanced",
            "tensor_model_parallel_size": 2,
            "pipeline_model_parallel_size": 1,
            "data_parallel_size": 4,
        },
        "training_config": {
            "global_batch_size": 64,
            "sequence_length": 2048,
            "num_gpus": 8,
            "parallel_strategy": "balanced",
        },
        "performance_metrics": {"total_steps": 32, "avg_step_time_seconds": 2.0, "tokens_per_second": 65536.0},
        "step_times": [20.0, 4.0, *[2.0] * 30],
    }
    return content | changes


def write_file(folder: Path, content: object, name: str = "run.json") -> Path:
    """Write text as it is and anything else as JSON."""
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def read_results(path: Path) -> list[ImportedResult]:
    return list(detect_format(path).read(path))


def ml_dataflow_line(**changes: float) -> list[float]:
    """Return a line of ml_dataflow's results: 68 sequences of 8192 tokens in 50 s."""
    values = dict.fromkeys(COLUMNS, 1.0) | {"sequence_length": 8192, "sequences_per_step": 68, "step_s": 50.0}
    values |= {"tokens_per_s": 68 * 8192 / 50, "mfu": 0.5} | changes
    return [values[name] for name in COLUMNS]


def test_metrics_are_derived_from_the_steps_after_warm_up(tmp_path: Path) -> None:
    (result,) = read_results(write_file(tmp_path, tprimat_benchmark()))
    assert result.params == {"sequence_length": 2048, "global_batch": 64, "tp": 2, "pp": 1, "dp": 4}
    derived = derive_metrics(result)
    assert derived["tokens_per_s"] == 64 * 2048 / 2 and derived["tokens_per_s_per_gpu"] == 8192
    assert derived["warmup_steps"] == 2
    assert not result.contradictions and not find_disagreements(result, derived)


def test_step_times_of_the_older_schema_are_read(tmp_path: Path) -> None:
    content = tprimat_benchmark()
    content["raw_step_times"] = content.pop("step_times")
    (result,) = read_results(write_file(tmp_path, content))
    assert len(result.step_times_s) == 32


def test_contradictions_within_a_file_are_reported(tmp_path: Path) -> None:
    content = tprimat_benchmark()
    content["training_config"] |= {"parallel_strategy": "other", "num_gpus": 16}
    content["performance_metrics"] |= {"total_steps": 10, "tokens_per_second": 262144.0}
    (result,) = read_results(write_file(tmp_path, content))
    assert result.contradictions == (
        "the strategy has two names: balanced and other",
        "total_steps is 10, but there are 32 step times",
        "the parallel degrees 2 x 1 x 4 do not give 16 GPUs",
    )
    message = "claimed tokens_per_s 262,144, but the steps after warm-up give 65,536"
    assert find_disagreements(result, derive_metrics(result)) == [
        f"{message} (a sequence length of 8,192 tokens would explain it)"
    ]


def test_a_wrong_claim_and_its_value_per_gpu_are_reported_once(tmp_path: Path) -> None:
    content = tprimat_benchmark()
    content["performance_metrics"] |= {"tokens_per_second": 68000.0, "tokens_per_second_per_gpu": 8500.0}
    (result,) = read_results(write_file(tmp_path, content))
    message = "claimed tokens_per_s 68,000, but the steps after warm-up give 65,536"
    assert find_disagreements(result, derive_metrics(result)) == [message]  # no sequence length explains 4%
    content["performance_metrics"] |= {"tokens_per_second_per_gpu": 4250.0}  # of twice the GPUs: another claim
    (result,) = read_results(write_file(tmp_path, content))
    assert len(find_disagreements(result, derive_metrics(result))) == 2


@pytest.mark.parametrize("columns", [COLUMNS, OLDER_COLUMNS])
def test_ml_dataflow_lines_are_read_with_and_without_the_columns_of_used_memory(
    tmp_path: Path, columns: list[str]
) -> None:
    changes: list[dict[str, float]] = [{}, {"step_s": 0.0}, {"tokens_per_s": 1e5}]
    rows = [dict(zip(COLUMNS, ml_dataflow_line(**change), strict=True)) for change in changes]
    text = "".join(",".join(str(row[name]) for name in columns) + "\n" for row in rows)
    feasible, infeasible, wrong_claim = read_results(write_file(tmp_path, text, "h100.csv"))
    assert feasible.feasible and feasible.claims["mfu"] == 0.5
    assert derive_metrics(feasible)["tokens_per_s"] == pytest.approx(68 * 8192 / 50)
    assert not infeasible.feasible and not derive_metrics(infeasible) and not infeasible.claims
    assert find_disagreements(wrong_claim, derive_metrics(wrong_claim)) == [
        "claimed tokens_per_s 100,000, but the steps after warm-up give 11,141"
    ]


def test_a_file_is_imported_completely_and_only_once(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    path = write_file(tmp_path, "".join([",".join(map(str, ml_dataflow_line())) + "\n"] * 3), "h.csv")
    assert import_file(path, uri, "imported").endswith("3 results; imported into imported")
    assert import_file(path, uri, "imported").endswith("already imported")
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("imported")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    assert sorted(run.data.tags["sweeper.kind"] for run in runs) == ["import", *["imported"] * 3]
    # An interrupted import is repeated.
    (parent,) = [run for run in runs if run.data.tags["sweeper.kind"] == "import"]
    client.update_run(parent.info.run_id, status="RUNNING")
    assert import_file(path, uri, "imported").endswith("imported into imported")
    assert len(client.search_runs([experiment.experiment_id])) == 4


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.json", b"", "is empty"),
        ("bytes.csv", b"\xff\xfe\x00\x01", "is not text"),
        ("zero.csv", b"1,2\x003", "is not text (a zero byte)"),
        ("other.txt", b"hello", "unknown format. Supported: tprimat benchmark (JSON); "),
        ("cut.json", json.dumps(tprimat_benchmark())[:300].encode(), "is truncated or not JSON"),
        (
            "cut.csv",
            (",".join(map(str, ml_dataflow_line())) + "\n1,2,3\n").encode(),
            "cut.csv:2: has 3 cells; allowed are 21 or 19 numbers",
        ),
        (
            "cut2.csv",
            ",".join(map(str, ml_dataflow_line()))[:-1].encode(),
            "cut2.csv: its last line has no newline, so it may be truncated",
        ),
        (
            "long.csv",
            (",".join(map(str, ml_dataflow_line())) + "\n" + "1" * 5000).encode(),
            "a line of more than 4096",
        ),
        ("times.json", json.dumps(tprimat_benchmark(step_times=[1, -2])).encode(), "no list of positive step times"),
    ],
)
def test_a_file_that_cannot_be_read_completely_is_refused_and_nothing_is_written(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (path := tmp_path / name).write_bytes(content)
    with pytest.raises(UserInputError) as error:
        import_file(path, f"sqlite:///{tmp_path}/mlflow.db", "imported")
    assert message in str(error.value) and not (tmp_path / "mlflow.db").exists()


@settings(max_examples=200, deadline=None)
@given(
    st.one_of(
        st.binary(max_size=300),
        st.text(max_size=300).map(str.encode),
        st.lists(st.lists(st.floats(), min_size=19, max_size=21), max_size=4).map(
            lambda rows: "\n".join(",".join(map(str, row)) for row in rows).encode()
        ),
        st.recursive(
            st.none() | st.booleans() | st.floats() | st.text(max_size=5),
            lambda inner: (
                st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(list(tprimat_benchmark())), inner)
            ),
            max_leaves=8,
        ).map(
            lambda value: json.dumps(
                {"platform": 1, "gpu_info": 1, "step_times": value, **(value if isinstance(value, dict) else {})}
            ).encode()
        ),
    ),
    st.sampled_from([".json", ".csv", ".log"]),
)
@example(b"0,0,1e200,0,0,0,0,0,0,0,0,1e200,0,0,0,0,0,0,0", ".csv")
def test_any_file_is_either_imported_or_refused_with_a_message_that_names_it(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, suffix: str
) -> None:
    (path := tmp_path_factory.getbasetemp() / f"fuzz{suffix}").write_bytes(content)
    try:
        assert ": " in import_file(path, None, "imported")
    except UserInputError as error:
        assert str(error).startswith(str(path))


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=50))
def test_warm_up_is_only_removed_from_the_beginning(times_s: list[float]) -> None:
    steady_times_s = drop_warmup(tuple(times_s))
    assert steady_times_s and steady_times_s == tuple(times_s[len(times_s) - len(steady_times_s) :])
    assert len(times_s) < 4 or len(steady_times_s) >= len(times_s) // 4


@pytest.mark.skipif(not REFERENCE.is_dir(), reason="the other projects' files are not here")
def test_files_of_other_projects_are_read_and_their_contradictions_reported() -> None:
    benchmarks = {path.name: import_file(path, None, "") for path in sorted(REFERENCE.glob("benchmark_json/*.json"))}
    assert "(a sequence length of 8,192 tokens would explain it)" in benchmarks["benchmark_rocm_llama.json"]
    tables = {path.name: import_file(path, None, "") for path in sorted(REFERENCE.glob("raw_offload_csv/*.csv"))}
    assert "168 results" in tables["h100_8b_short_results.csv"]
    assert "490 results; 88 of them infeasible" in tables["rtx5090_8B_results.csv"]


# ── logs ──


def megatron_log(steps: int = 20, **changes: Any) -> str:
    """Return a log of Megatron-LM: 256 sequences of 8192 tokens in 2 s on 8 GPUs, after two slow steps."""
    run = {"ms": 2000.0, "batch": 256, "length": 8192, "gpus": 8} | changes
    head = f"  seq_length ............... {run['length']}\n  world_size ............... {run['gpus']}\n"
    lines = [
        MEGATRON.format(n=n, samples=256 * n, ms=9 * run["ms"] if n < 3 else run["ms"], tflops=400.0, loss=9.0 / n)
        for n in range(1, steps + 1)
    ]
    return head + "\n".join(lines).replace("size:   256", f"size:   {run['batch']}") + "\n"


def test_metrics_of_a_log_are_derived_from_its_steps_after_warm_up(tmp_path: Path) -> None:
    (result,) = read_results(write_file(tmp_path, megatron_log(), "run.log"))
    assert result.machine_info["program"] == "Megatron-LM" and result.params["sequence_length"] == 8192
    derived = derive_metrics(result)
    assert derived["warmup_steps"] == 2
    assert derived["tokens_per_s_per_gpu"] == pytest.approx(256 * 8192 / 2 / 8)
    assert result.claims == {"tflops_per_gpu": 400.0} and not result.contradictions


def test_values_that_a_log_does_not_contain_stay_unknown(tmp_path: Path) -> None:
    # Without the two lines of the configuration, and without the newline of the last line.
    (result,) = read_results(write_file(tmp_path, "\n".join(megatron_log().splitlines()[2:]), "run.log"))
    assert result.tokens_per_step == 0 and result.devices is None and len(result.step_times_s) == 19
    derived = derive_metrics(result)
    assert "tokens_per_s" not in derived and derived["step_time_ms"] == 2000


def test_the_stated_mfu_of_a_log_is_compared_with_its_flops(tmp_path: Path) -> None:
    lines = [TITAN.format(rank=0, minute=4, second=2.0 * n, n=n, loss=3, tps=8192, tflops=449.0) for n in range(9)]
    config = "Running with configs: {\n" + '  "training": {\n    "seq_len": 8192,\n    "global_batch_size": 16\n  },\n}'
    head = f"INFO - GPU capacity: NVIDIA H200 with 139.8GiB memory\n{config}\n[rank-0/8] x | iteration 1\n"
    text = head + "\n".join(lines).replace("45.40%", "22.70%") + "\n"
    (result,) = read_results(write_file(tmp_path, text, "titan.log"))
    assert result.device == "NVIDIA H200"
    assert "the stated MFU is 22.7%, but 449 TFLOP/s are 45.4% of the dense bf16 peak" in result.contradictions


def test_a_wrong_rate_is_reported_with_the_sequence_length_that_would_explain_it(tmp_path: Path) -> None:
    rate = "tokens per GPU (tokens/s/GPU): 524288.0 | throughput per GPU"
    path = write_file(tmp_path, megatron_log().replace("throughput per GPU", rate), "run.log")
    message = "claimed tokens_per_s_per_gpu 524,288, but the steps after warm-up give 131,072"
    assert import_file(path, None, "imported").endswith(
        f", 1 result; 1 contradiction: {message} (a sequence length of 32,768 tokens would explain it)"
    )


def test_a_large_log_needs_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "large.log"
    with path.open("w") as file:
        file.write(megatron_log(4))
        for _ in range(64):
            file.write("x" * 2**20)  # one line of 64 MiB
    tracemalloc.start()
    (result,) = read_results(path)
    assert tracemalloc.get_traced_memory()[1] < 8 * 2**20
    tracemalloc.stop()
    assert len(result.step_times_s) == 4
