"""Other tools' files: what they say, what does not fit together in them, and what is refused whole."""

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
from sweeper.ingest.__main__ import take
from sweeper.ingest.derive import disagreements, metrics, steady
from sweeper.ingest.formats import COLUMNS, OLDER, recognise
from tests.conftest import REPOSITORY
from tests.support.trainer_logs import MEGATRON, TITAN

PEERS = REPOSITORY.parent / "shared" / "reference"


def benchmark(**changes: Any) -> dict[str, Any]:
    """One of tprimat's, of the newer schema: 64 sequences of 2048 tokens in 2 s."""
    times = [20.0, 4.0, *[2.0] * 30]
    plain: dict[str, Any] = {
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
        "step_times": times,
    }
    return plain | changes


def written(folder: Path, plain: object, name: str = "run.json") -> Path:
    path = folder / name
    path.write_text(plain if isinstance(plain, str) else json.dumps(plain))
    return path


def line(**changes: float) -> list[float]:
    """One of ml_dataflow's: 68 sequences of 8192 tokens in 50 s."""
    values = dict.fromkeys(COLUMNS, 1.0) | {"sequence_length": 8192, "sequences_per_step": 68, "step_s": 50.0}
    values |= {"tokens_per_s": 68 * 8192 / 50, "mfu": 0.5} | changes
    return [values[name] for name in COLUMNS]


def test_a_benchmarks_figures_are_made_of_its_steps_after_warm_up(tmp_path: Path) -> None:
    (found,) = recognise(path := written(tmp_path, benchmark())).read(path)
    assert found.params == {"sequence_length": 2048, "global_batch": 64, "tp": 2, "pp": 1, "dp": 4}
    own = metrics(found)
    assert own["tokens_per_s"] == 64 * 2048 / 2 and own["tokens_per_s_per_gpu"] == 8192 and own["warmup_steps"] == 2
    assert not found.contradictions and not disagreements(found, own)


def test_the_older_schema_has_its_times_elsewhere(tmp_path: Path) -> None:
    plain = benchmark()
    plain["raw_step_times"] = plain.pop("step_times")
    (found,) = recognise(path := written(tmp_path, plain)).read(path)
    assert len(found.step_times_s) == 32


def test_what_does_not_fit_together_is_named(tmp_path: Path) -> None:
    plain = benchmark()
    plain["training_config"] |= {"parallel_strategy": "other", "num_gpus": 16}
    plain["performance_metrics"] |= {"total_steps": 10, "tokens_per_second": 262144.0}
    (found,) = recognise(path := written(tmp_path, plain)).read(path)
    assert found.contradictions == (
        "the strategy is called balanced and other",
        "10 steps are claimed, 32 times are there",
        "degrees 2 x 1 x 4 do not make 16 GPUs",
    )
    claimed = "tokens_per_s 262,144 is claimed, its steps after warm-up give 65,536"
    assert disagreements(found, metrics(found)) == [f"{claimed}, unless a sequence has 8,192 tokens"]


def test_a_claim_and_its_share_of_each_gpu_are_told_once(tmp_path: Path) -> None:
    plain = benchmark()
    plain["performance_metrics"] |= {"tokens_per_second": 68000.0, "tokens_per_second_per_gpu": 8500.0}
    (found,) = recognise(path := written(tmp_path, plain)).read(path)
    words = "tokens_per_s 68,000 is claimed, its steps after warm-up give 65,536"
    assert disagreements(found, metrics(found)) == [words]  # no length of a sequence explains 4%
    plain["performance_metrics"] |= {"tokens_per_second_per_gpu": 4250.0}  # of twice as many GPUs: another claim
    (found,) = recognise(path := written(tmp_path, plain)).read(path)
    assert len(disagreements(found, metrics(found))) == 2


@pytest.mark.parametrize("columns", [COLUMNS, OLDER])
def test_lines_of_budgets_with_and_without_what_was_used(tmp_path: Path, columns: list[str]) -> None:
    rows = [
        dict(zip(COLUMNS, line(**changes), strict=True)) for changes in ({}, {"step_s": 0.0}, {"tokens_per_s": 1e5})
    ]
    text = "".join(",".join(str(row[name]) for name in columns) + "\n" for row in rows)
    good, zeros, odd = recognise(path := written(tmp_path, text, "h100.csv")).read(path)
    assert (
        good.feasible and metrics(good)["tokens_per_s"] == pytest.approx(68 * 8192 / 50) and good.claims["mfu"] == 0.5
    )
    assert not zeros.feasible and not metrics(zeros) and not zeros.claims
    assert disagreements(odd, metrics(odd)) == ["tokens_per_s 100,000 is claimed, its steps after warm-up give 11,141"]


def test_an_import_is_whole_and_only_once(tmp_path: Path) -> None:
    uri, path = (
        f"sqlite:///{tmp_path}/mlflow.db",
        written(tmp_path, "".join([",".join(map(str, line())) + "\n"] * 3), "h.csv"),
    )
    assert take(path, uri, "imported").endswith("3 results; imported into imported")
    assert take(path, uri, "imported").endswith("already imported")
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("imported")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    assert sorted(run.data.tags["sweeper.kind"] for run in runs) == ["import", *["imported"] * 3]
    # One that was cut off is done again.
    (parent,) = [run for run in runs if run.data.tags["sweeper.kind"] == "import"]
    client.update_run(parent.info.run_id, status="RUNNING")
    assert take(path, uri, "imported").endswith("imported into imported")
    assert len(client.search_runs([experiment.experiment_id])) == 4


@pytest.mark.parametrize(
    ("name", "content", "wanted"),
    [
        ("empty.json", b"", "is empty"),
        ("bytes.csv", b"\xff\xfe\x00\x01", "is no text"),
        ("zero.csv", b"1,2\x003", "is no text (a zero byte)"),
        ("other.txt", b"hello", "is of no format that is understood"),
        ("cut.json", json.dumps(benchmark())[:300].encode(), "is cut off"),
        ("cut.csv", (",".join(map(str, line())) + "\n1,2,3\n").encode(), "cut.csv:2: 21 or 19 numbers were expected"),
        ("cut2.csv", ",".join(map(str, line()))[:-1].encode(), "cut2.csv: its last line has no end, so it may be cut"),
        ("long.csv", (",".join(map(str, line())) + "\n" + "1" * 5000).encode(), "a line of more than 4096"),
        ("times.json", json.dumps(benchmark(step_times=[1, -2])).encode(), "no list of step times above zero"),
    ],
)
def test_a_file_that_cannot_be_read_whole_is_not_read_at_all(
    tmp_path: Path, name: str, content: bytes, wanted: str
) -> None:
    (path := tmp_path / name).write_bytes(content)
    with pytest.raises(UserInputError) as said:
        take(path, f"sqlite:///{tmp_path}/mlflow.db", "imported")
    assert wanted in str(said.value) and not (tmp_path / "mlflow.db").exists()


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
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(list(benchmark())), inner),
            max_leaves=8,
        ).map(
            lambda odd: json.dumps(
                {"platform": 1, "gpu_info": 1, "step_times": odd, **(odd if isinstance(odd, dict) else {})}
            ).encode()
        ),
    ),
    st.sampled_from([".json", ".csv", ".log"]),
)
@example(b"0,0,1e200,0,0,0,0,0,0,0,0,1e200,0,0,0,0,0,0,0", ".csv")
def test_no_file_brings_it_down(tmp_path_factory: pytest.TempPathFactory, content: bytes, suffix: str) -> None:
    (path := tmp_path_factory.getbasetemp() / f"fuzz{suffix}").write_bytes(content)
    try:
        assert ": " in take(path, None, "imported")
    except UserInputError as said:
        assert str(said).startswith(str(path))


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=50))
def test_warm_up_is_only_ever_taken_from_the_beginning(times: list[float]) -> None:
    kept = steady(tuple(times))
    assert kept and kept == tuple(times[len(times) - len(kept) :])
    assert len(times) < 4 or len(kept) >= len(times) // 4


@pytest.mark.skipif(not PEERS.is_dir(), reason="the peers' own files are not here")
def test_the_peers_own_files_are_read_and_their_contradictions_found() -> None:
    said = {path.name: take(path, None, "imported") for path in sorted(PEERS.glob("benchmark_json/*.json"))}
    assert "unless a sequence has 8,192 tokens" in said["benchmark_rocm_llama.json"]
    rows = {path.name: take(path, None, "imported") for path in sorted(PEERS.glob("raw_offload_csv/*.csv"))}
    assert "168 results" in rows["h100_8b_short_results.csv"]
    assert "490 results; 88 of them did not work" in rows["rtx5090_8B_results.csv"]


# ── logs ──


def megatron(steps: int = 20, **changes: Any) -> str:
    """A log of Megatron-LM: 256 sequences of 8192 tokens in 2 s on 8 GPUs, after two slow steps."""
    said = {"ms": 2000.0, "batch": 256, "length": 8192, "gpus": 8} | changes
    head = f"  seq_length ............... {said['length']}\n  world_size ............... {said['gpus']}\n"
    lines = [
        MEGATRON.format(n=n, samples=256 * n, ms=9 * said["ms"] if n < 3 else said["ms"], tflops=400.0, loss=9.0 / n)
        for n in range(1, steps + 1)
    ]
    return head + "\n".join(lines).replace("size:   256", f"size:   {said['batch']}") + "\n"


def test_a_logs_figures_are_made_of_its_steps_after_warm_up(tmp_path: Path) -> None:
    path = written(tmp_path, megatron(), "run.log")
    (found,) = recognise(path).read(path)
    assert found.machine_info["program"] == "Megatron-LM" and found.params["sequence_length"] == 8192
    own = metrics(found)
    assert own["warmup_steps"] == 2
    assert own["tokens_per_s_per_gpu"] == pytest.approx(256 * 8192 / 2 / 8)
    assert found.claims == {"tflops_per_gpu": 400.0} and not found.contradictions


def test_what_a_log_does_not_say_stays_unknown(tmp_path: Path) -> None:
    path = written(tmp_path, "\n".join(megatron().splitlines()[2:]), "run.log")  # its last line is cut off
    (found,) = recognise(path).read(path)
    assert found.tokens_per_step == 0 and found.devices is None and len(found.step_times_s) == 19
    assert "tokens_per_s" not in metrics(found) and metrics(found)["step_time_ms"] == 2000


def test_claims_of_a_log_are_held_against_its_own_figures(tmp_path: Path) -> None:
    lines = [TITAN.format(rank=0, minute=4, second=2.0 * n, n=n, loss=3, tps=8192, tflops=449.0) for n in range(9)]
    told = "Running with configs: {\n" + '  "training": {\n    "seq_len": 8192,\n    "global_batch_size": 16\n  },\n}'
    head = f"INFO - GPU capacity: NVIDIA H200 with 139.8GiB memory\n{told}\n[rank-0/8] x | iteration 1\n"
    text = head + "\n".join(lines).replace("45.40%", "22.70%") + "\n"
    path = written(tmp_path, text, "titan.log")
    (found,) = recognise(path).read(path)
    assert found.device == "NVIDIA H200"
    assert "an MFU of 22.7% is stated; of the dense bf16 peak its 449 TFLOP/s are 45.4%" in found.contradictions


def test_a_rate_that_disagrees_is_told_once_with_the_length_that_would_fit(tmp_path: Path) -> None:
    rate = "tokens per GPU (tokens/s/GPU): 524288.0 | throughput per GPU"
    path = written(tmp_path, megatron().replace("throughput per GPU", rate), "run.log")
    told = "tokens_per_s_per_gpu 524,288 is claimed, its steps after warm-up give 131,072"
    assert take(path, None, "imported").endswith(
        f", 1 result; 1 contradiction: {told}, unless a sequence has 32,768 tokens"
    )


def test_a_large_log_takes_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "large.log"
    with path.open("w") as file:
        file.write(megatron(4))
        for _ in range(64):
            file.write("x" * 2**20)  # one line of 64 MiB
    tracemalloc.start()
    (found,) = recognise(path).read(path)
    assert tracemalloc.get_traced_memory()[1] < 8 * 2**20
    tracemalloc.stop()
    assert len(found.step_times_s) == 4
