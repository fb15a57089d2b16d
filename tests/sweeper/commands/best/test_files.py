"""The files of one trial: a trainer's own configuration, and what runs a sweep's winner again."""

import json
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from sweeper.commands.best.files import build_files
from sweeper.commands.best.main import write_trial
from sweeper.results.stored import Winner, find_sweep, find_sweeps
from tests.conftest import REPOSITORY, environment
from tests.support.factories import sweep_description, trial_record
from tests.sweeper.conftest import FinishedSweep
from workloads.api.errors import UserInputError
from workloads.formats.files import read_layout

LAYOUT = {"tp": 2, "pp": 1, "cp": 1, "micro_batch": 2, "checkpointing": "full", "global_batch": 64}
POINT = {**LAYOUT, "sequence_length": 8192, "precision": "fp8_tensorwise", "compile": True, "weights": "float32"}


def preset(name: str, **changes: Any) -> dict[str, Any]:
    settings = yaml.safe_load((REPOSITORY / f"conf/workload/{name}.yaml").read_text())["command"]
    return {**settings, "directory": "/work dir", **changes}


def test_a_trainers_own_configuration_is_among_the_files(tmp_path: Path) -> None:
    constants = {"assets": "/data/my tokenizer", "dataset_path": "/data/text", "env.NCCL_ALGO": "Ring"}
    of_node = {"gpus": 8, "ranks_per_node": 8, "constants": constants}
    description = sweep_description(["sweeper"], "command", settings=preset("torchtitan"), **of_node)
    files = build_files(description, trial_record(3, POINT), Winner(3, 9.5), tmp_path / "best")
    assert not files.notes
    read = tomllib.loads(files.files["program/config.toml"])
    assert read["parallelism"]["tensor_parallel_degree"] == 2 and read["training"]["global_batch_size"] == 64
    assert read["model"]["hf_assets_path"] == "/data/my tokenizer"
    script = files.files["program/run.sh"]
    assert f"--job.config_file={tmp_path}/best/program/config.toml" in script
    assert "--nproc-per-node=8" in script and "--quantize.linear.float8.enable_fsdp_float8_all_gather" in script
    assert "cd '/work dir' || exit 1" in script and "export NCCL_ALGO=Ring" in script
    assert "$" not in script  # one node: nothing differs between processes


def test_a_script_for_several_nodes_takes_what_differs_from_variables(tmp_path: Path) -> None:
    megatron = preset("megatron", run=["sh", "-c", 'echo "$0" {node_rank} {master_address}', "a b"], options={})
    megatron["directory"] = str(tmp_path)
    of_nodes = {"gpus": 16, "ranks_per_node": 8, "nodes": 2, "constants": {}}
    description = sweep_description(["sweeper"], "command", settings=megatron, **of_nodes)
    point = {name: value for name, value in LAYOUT.items() if name != "checkpointing"} | {"sequence_length": 8}
    build_files(
        description, trial_record(0, point | {"precision": "bf16", "checkpointing": "none"}), None, tmp_path / "best"
    ).write()
    script = tmp_path / "best" / "program" / "run.sh"
    assert "Start it on each of 2 nodes" in script.read_text()
    again = subprocess.run([script], env={"NODE_RANK": "1", "PATH": "/bin:/usr/bin"}, capture_output=True, text=True)
    assert again.stdout == "a b 1 127.0.0.1\n", again.stderr


def test_the_layout_of_our_trainer_is_written_for_others(tmp_path: Path) -> None:
    params = {"model": "llama3_8b", "sequence_length": 8192, "global_batch": 64, "dp_shard": 4, "tp": 2}
    params |= {"dp_replicate": 1, "cp": 1, "pp": 1, "micro_batch": 1, "checkpointing": "full", "compile": False}
    params |= {"dtype": "bf16", "state": "fp32", "reshard_after_forward": True}
    description = sweep_description(["sweeper"], "parallel", gpus=8, ranks_per_node=8, constants={})
    files = build_files(description, trial_record(0, params), None, tmp_path)
    (titan,) = (text for name, text in files.files.items() if name.startswith("torchtitan/"))
    layout = read_layout(titan, 8).layout
    assert (layout.dp_shard, layout.tp, layout.global_batch) == (4, 2, 64)
    assert any(name.startswith("megatron/") for name in files.files) or any("megatron" in note for note in files.notes)


@pytest.mark.long(30)
@pytest.mark.xdist_group("finished_sweep")
def test_a_sweep_keeps_what_runs_its_winner(finished_sweep: FinishedSweep) -> None:
    (sweep,) = find_sweeps(finished_sweep.workspace.path)
    end = json.loads(finished_sweep.result.err.splitlines()[-1])
    result = json.loads((sweep.folder / "best" / "best.json").read_text())
    assert result["parameters"].items() >= end["best"]["params"].items()
    assert result["result"]["value"] == end["finals"][0]["value"]["value"] and result["result"]["rounds"] == 5
    assert result["software"]["torch"] and result["process"]["torch"] and result["git"].keys() >= {"commit"}
    assert sweep.state == "finished" and sweep.winner and sweep.winner.trial == result["trial"]
    assert f"python -m sweeper best {sweep.name}" in finished_sweep.result.out
    line = (sweep.folder / "best" / "sweep.sh").read_text()
    assert all(f" space.{name}={value} " in line for name, value in end["best"]["params"].items())


@pytest.mark.long(30)
@pytest.mark.xdist_group("finished_sweep")
def test_any_trial_of_a_sweep_can_be_chosen(finished_sweep: FinishedSweep, tmp_path: Path) -> None:
    shutil.copytree(finished_sweep.workspace.path / "sweeps", tmp_path / "sweeps")
    files = write_trial(find_sweep(tmp_path, "products"), 0)
    assert (
        (tmp_path / "sweeps/products/files/0000/run/sweep.sh").read_text().startswith(f"#!/bin/sh\n# {files.title}\n")
    )
    assert "a single trial" in files.title or "rounds of the finals" in files.title
    with pytest.raises(UserInputError, match=r"trial=99: products has no such trial\. Available: 0 to 22"):
        write_trial(find_sweep(tmp_path, "products"), 99)
    with pytest.raises(UserInputError, match=r"product: unknown sweep\. Did you mean products\? Available"):
        find_sweep(tmp_path, "product")


@pytest.mark.soak
@pytest.mark.xdist_group("finished_sweep")
def test_the_winner_runs_again_to_its_figure(finished_sweep: FinishedSweep, tmp_path: Path) -> None:
    """On a CPU, equal runs differ by up to 15%."""
    best = finished_sweep.workspace.sweeps[0] / "best"
    result = json.loads((best / "best.json").read_text())["result"]
    for _ in range(2):
        command = ["sh", best / "sweep.sh"]
        again = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=120)
        assert again.returncode == 0, again.stderr
        sweep = find_sweeps(tmp_path)[0]  # the last one
        assert sweep.winner is not None and len(sweep.records) == 1
        assert result["low"] / 1.15 <= sweep.winner.value <= result["high"] * 1.15
    assert len(find_sweeps(tmp_path)) == 2
