"""The layouts of a command, and the presets of trainers that run where these are installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import REPOSITORY, Workspace
from workloads.api.contract import Machine
from workloads.api.registry import load
from workloads.command.template import render


def test_only_valid_layouts_of_a_command_with_layout_are_tried() -> None:
    loaded: Any = load("command")
    layout = {"tp": "{tensor}", "pp": "{pipeline}"}
    settings = {"run": ["x"], "layout": layout, "global_batch": "64", "sequence_length": "8192", "model": "llama3_8b"}
    command = loaded.with_settings(loaded.Settings(**settings))
    machine = Machine("gpu", "sm90", 8, 8, 131.0)

    def unsupported_reason(tensor: int, pipeline: int, machine: Machine = machine) -> str:
        return str(command.estimate(command.Parameters(tensor=tensor, pipeline=pipeline), machine).unsupported_reason)

    assert unsupported_reason(2, 1) == unsupported_reason(4, 2) == ""
    assert "= 6 ranks, but there are 8" in unsupported_reason(3, 2) and "16 ranks" in unsupported_reason(16, 1)
    assert "tp=0, it has to be a whole number" in unsupported_reason(0, 1)
    three_ranks = Machine("gpu", "sm90", 3, 8, 131.0)
    assert "pp 3 does not divide 32 layers" in unsupported_reason(1, 3, three_ranks)


def test_torchtitan_accepts_the_configuration_of_its_preset(workspace: Workspace, tmp_path: Path) -> None:
    """Only its parser runs, since training needs a GPU. Skipped where torchtitan or triton is not installed."""
    pytest.importorskip("triton")
    pytest.importorskip("torchtitan", exc_type=ImportError)
    preset = yaml.safe_load((REPOSITORY / "conf/workload/torchtitan.yaml").read_text())
    values = {"sequence_length": 8192, "global_batch": 16, "tp": 2, "pp": 1, "cp": 1, "micro_batch": 2}
    values |= {"checkpointing": "full", "compile": True, "assets": "a", "dataset_path": "b", "output": "o"}
    text = render("config.toml", preset["command"]["files"]["config.toml"], values)
    (tmp_path / "config.toml").write_text(text)
    program = (
        "import sys; from torchtitan.config import ConfigManager as M; c = M().parse_args(sys.argv[1:]); "
        "print(c.parallelism.tensor_parallel_degree, c.training.seq_len, c.activation_checkpoint.mode, "
        "c.model.flavor, *c.model.converters)"
    )
    fp8 = preset["command"]["options"]["precision"]["fp8_tensorwise"]
    command = [sys.executable, "-c", program, f"--job.config_file={tmp_path}/config.toml", *fp8]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.stdout.splitlines()[-1:] == ["2 8192 full 8B quantize.linear.float8"], result.stderr[-2000:]


@pytest.mark.gpu
def test_the_debug_model_of_torchtitan_trains(workspace: Workspace) -> None:
    pytest.importorskip("torchtitan", exc_type=ImportError)
    from benchmarks.trainers import make_text

    make_text(workspace.path, vocabulary=2000)
    arguments = [f"space.assets={workspace.path}/assets", f"space.dataset_path={workspace.path}/text"]
    arguments += ["space.micro_batch=2", "space.checkpointing=none", "gpus=1"]
    result = workspace.run("workload=torchtitan_debug", "search=grid", "progress=never", *arguments)
    assert result.code == 0, result.out + result.err
    (trial_run,) = workspace.runs("trial")
    assert trial_run.data.metrics["tokens_per_s"] > 0 and trial_run.data.metrics["steps"] == 10
