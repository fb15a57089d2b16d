"""Tests of the import: files and folders that are read or refused, and what is written to the store."""

import json
import re
import shutil
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from mlflow import MlflowClient
from mlflow.entities import Run

from sweeper.commands.ingest import write
from sweeper.commands.ingest.imported import drop_warmup, find_device_in_name
from sweeper.commands.ingest.main import import_file, main
from tests.conftest import REPOSITORY, examples
from tests.support.imports import ml_dataflow_csv, tprimat_benchmark
from workloads.api.errors import UserInputError

SAMPLES = REPOSITORY / "tests" / "samples" / "logs"
# Files of other projects beside the checkout, where there are any.
REFERENCE = REPOSITORY.parent / "shared" / "reference"


def stored_runs(uri: str, kind: str) -> list[Run]:
    """Return the runs of a kind in the experiment of imports."""
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("imported")
    assert experiment is not None
    return list(client.search_runs([experiment.experiment_id], f"tags.`sweeper.kind` = '{kind}'"))


def test_a_file_is_imported_completely_and_only_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    change = {"sequence_length": 1048576.0, "sequences_per_step": 1.0, "mfu": 0.9}
    (path := tmp_path / "run_h100_8b.csv").write_text(ml_dataflow_csv(change, {}, {}))
    assert "3 results; imported into imported\n" in import_file(path, uri, "imported")
    assert "; already imported\n" in import_file(path, uri, "imported")
    (parent,) = stored_runs(uri, "import")
    runs = {run.info.run_name: run.data for run in stored_runs(uri, "imported")}
    assert len(runs) == 3
    data = runs["run_h100_8b line 1"]
    assert data.params["sequence_length"] == "1048576" and data.params["model"] == "llama3_8b"
    assert data.metrics["peak_device_gib"] == 38.25 and data.metrics["claimed_mfu"] == 0.9
    assert data.tags["device"] == "h100" and "claimed mfu 0.9, but" in data.tags["contradictions"]
    assert data.tags["notes"] == "the device is taken from the file's name: h100"
    # An interrupted import is repeated.
    MlflowClient(tracking_uri=uri).update_run(parent.info.run_id, status="RUNNING")
    assert "; imported into imported\n" in import_file(path, uri, "imported")
    # So is one for another device, and one that another version of the importer made.
    assert "; imported again into imported\n" in import_file(path, uri, "imported", "h200")
    monkeypatch.setattr(write, "IMPORTER_VERSION", "next")
    assert "; imported again into imported\n" in import_file(path, uri, "imported", "h200")
    assert len(stored_runs(uri, "import")) == 1 and len(stored_runs(uri, "imported")) == 3


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.json", b"", "is empty"),
        ("bytes.csv", b"\xff\xfe\x00\x01", "is not text"),
        ("zero.csv", b"1,2\x003", "is not text (a zero byte)"),
        ("other.txt", b"hello", "unknown format. Supported: tprimat benchmark (JSON); "),
        ("cut.json", json.dumps(tprimat_benchmark())[:300].encode(), "is truncated or not JSON"),
        ("cut.csv", (ml_dataflow_csv({}) + "1,2,3\n").encode(), "cut.csv:2: has 3 cells; allowed are 21 or 19 numbers"),
        ("cut2.csv", ml_dataflow_csv({})[:-1].encode(), "cut2.csv: its last line has no newline, so it may be"),
        ("long.csv", (ml_dataflow_csv({}) + "1" * 5000).encode(), "a line of more than 4096"),
        ("many.csv", ml_dataflow_csv({"sequences_per_step": 1e14}).encode(), "tokens per step; allowed are 0 to 1e+15"),
        ("times.json", json.dumps(tprimat_benchmark(step_times=[1, 10**400])).encode(), "no list of positive step"),
    ],
)
def test_a_file_that_cannot_be_read_completely_is_refused_and_nothing_is_written(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (path := tmp_path / name).write_bytes(content)
    with pytest.raises(UserInputError) as error:
        import_file(path, f"sqlite:///{tmp_path}/mlflow.db", "imported")
    assert message in str(error.value) and not (tmp_path / "mlflow.db").exists()


def ingest(*words: str | Path) -> int:
    """Run the command in this process. Returns its exit code."""
    with pytest.raises(SystemExit) as end:
        main(list(map(str, words)))
    return int(str(end.value.code))


def test_a_new_folder_is_made_and_one_that_cannot_be_is_refused_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = str(SAMPLES / "megatron.log")
    with pytest.raises(SystemExit) as stop:
        main([log, f"dir={tmp_path / 'new' / 'folder'}"])
    assert not stop.value.code and list((tmp_path / "new" / "folder").glob("*.db"))
    (tmp_path / "mlflow.db").write_text("no database")
    assert ingest(log, f"dir={tmp_path}") == 2 and "mlflow.db: is not a SQLite database" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as stop:
        main([log, f"dir={tmp_path / 'file' / 'folder'}"])
    assert stop.value.code == 2 and "the folder of the store cannot be made: Not a directory" in capsys.readouterr().err


def test_a_folder_is_imported_with_the_reason_for_each_file_that_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "runs"
    (folder / "more").mkdir(parents=True)
    shutil.copy(SAMPLES / "titan.log", folder / "more")
    shutil.copy(SAMPLES / "megatron_one_line.log", folder)
    (folder / "notes.txt").write_text("no result")
    (folder / ".hidden.log").write_text("no result")
    assert ingest(folder, "--check", f"dir={tmp_path}") == 0
    first, second, third, summary = capsys.readouterr().out.splitlines()
    assert first.startswith(f"refused: {folder}/megatron_one_line.log: is a log of Megatron-LM with the time of one")
    rates = "46,811 tokens/s, 282.3 TFLOP/s a GPU, MFU 28.5%"
    assert second == f"{folder}/more/titan.log: log of torchtitan; 1 result; 700 ms a step, {rates}"
    assert third.startswith(f"refused: {folder}/notes.txt: unknown format")
    assert summary == "3 files: 1 read, 2 refused"
    # A file that is named and refused, and a folder without a result, are errors; what can be read is read.
    assert ingest(folder / "notes.txt", folder / "more" / "titan.log", "--check") == 2
    captured = capsys.readouterr()
    assert "unknown format" in captured.err and "46,811 tokens/s" in captured.out
    (tmp_path / "empty").mkdir()
    assert ingest(tmp_path / "empty", "--check") == 2
    assert "no file could be imported" in capsys.readouterr().err


def test_every_contradiction_is_printed_or_said_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = [{"tokens_per_s": 1e5 + line} for line in range(8)]
    (path := tmp_path / "results.csv").write_text(ml_dataflow_csv(*wrong))
    checked = import_file(path, None, "imported", "h100")
    assert len(re.findall("claimed tokens_per_s 100,00[0-7], but", checked)) == 8
    monkeypatch.setattr(write, "write", lambda *_: "written")  # what the store gets is another test's
    written = import_file(path, "sqlite:///unused.db", "imported", "h100")
    assert len(re.findall("claimed tokens_per_s 100,00[0-7], but", written)) == 5
    assert written.endswith("… and 3 more: all are in the report and, with --check, here")


def test_the_device_is_the_commands_or_in_the_name_of_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, device in [("rtx5090_8B.csv", "rtx5090"), ("run-H100-PCIe.csv", "h100_pcie"), ("ah100.csv", "")]:
        assert find_device_in_name(tmp_path / name) == device
    (path := tmp_path / "results.csv").write_text(ml_dataflow_csv({}))
    assert ingest(path, "--check", "device=h10") == 2
    error = capsys.readouterr().err
    assert "device=h10: unknown device. Did you mean h100? Available: " in error


@examples(100)
@given(
    st.one_of(
        st.binary(max_size=300),
        st.text(max_size=300).map(str.encode),
        st.lists(st.lists(st.floats(), min_size=19, max_size=21), max_size=4).map(
            lambda rows: "\n".join(",".join(map(str, row)) for row in rows).encode()
        ),
        st.recursive(
            st.none() | st.booleans() | st.floats() | st.integers(-1, 10**400) | st.text(max_size=5),
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
@example(b"1,1,1,8,1,1,1,1,1,1,1,1,1,1,1,1e-300,1,1,1\n", ".csv")
@example(json.dumps(tprimat_benchmark(step_times=[10**400])).encode(), ".json")
@example(b"iteration 1/2 | world_size ... | elapsed time per iteration (ms): " + b"9" * 400 + b" |\n", ".log")
@example(b" world_size ... 999999999999999999\n iteration 2/3 | elapsed time per iteration (ms): 5.0 |\n", ".log")
def test_any_file_is_either_imported_or_refused_with_a_message_that_names_it(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, suffix: str
) -> None:
    (path := tmp_path_factory.getbasetemp() / f"fuzz{suffix}").write_bytes(content)
    try:
        assert ": " in import_file(path, None, "imported")
    except UserInputError as error:
        assert str(error).startswith(str(path))


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=50))
@example([60.0, 5.0])
@example([60.0, 5.0, 5.0])
def test_warm_up_is_only_removed_from_the_beginning(times_s: list[float]) -> None:
    steady_times_s = drop_warmup(tuple(times_s))
    assert steady_times_s and steady_times_s == tuple(times_s[len(times_s) - len(steady_times_s) :])
    assert len(steady_times_s) >= len(times_s) // 4
    if times_s[0] > 2 * max(times_s[1:], default=10):
        assert len(steady_times_s) < len(times_s)


@pytest.mark.skipif(not REFERENCE.is_dir(), reason="the other projects' files are not here")
def test_files_of_other_projects_are_read_and_their_contradictions_reported() -> None:
    benchmarks = {path.name: import_file(path, None, "") for path in sorted(REFERENCE.glob("benchmark_json/*.json"))}
    assert "(a sequence length of 8,192 tokens would explain it)" in benchmarks.pop("benchmark_rocm_llama.json")
    # Their means are those of the steps after the first, and so no contradictions.
    assert not any("contradiction" in text for text in benchmarks.values())
    tables = {path.name: import_file(path, None, "") for path in sorted(REFERENCE.glob("raw_offload_csv/*.csv"))}
    assert "168 results" in tables["h100_8b_short_results.csv"]
    assert "490 results; 88 of them infeasible" in tables["rtx5090_8B_results.csv"]
    assert not any("contradiction" in text for text in tables.values())
