"""What is kept of a program: its command, its files and its last lines, without secrets."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.programs import STEPS, escape, run_program
from workloads.api.contract import Machine, ProgramFailed, Rank, output_of
from workloads.api.registry import load
from workloads.api.trial import run_trial


@pytest.mark.parametrize(
    "program",
    [
        "print('hello; hint-for-the-user')",
        "print('hello; hint-for-the-user'); raise SystemExit(1)",
        "print('hello; hint-for-the-user'); print('CUDA out of memory', flush=True); import time; time.sleep(9)",
        "print('hello; hint-for-the-user\\nloss=nan')",
        "print('  tensor_model_parallel_size ....... 4\\nhello; hint-for-the-user')\n" + STEPS,
    ],
    ids=["no steps", "exit", "out of memory", "nan", "another layout"],
)
def test_a_program_without_a_measurement_leaves_its_last_lines_and_its_files(program: str) -> None:
    with pytest.raises(Exception) as error:
        run_program(program, parameters={"tp": 2}, environment={"T": "{tp}"}, files={"a.json": {"tp": "{tp}"}})
    output = output_of(error.value)
    assert "hello; hint-for-the-user" in output.last_lines and "Traceback" not in output.last_lines
    assert json.loads(output.files["a.json"]) == {"tp": 2} and b"hint-for-the-user" in output.files["log.txt"]


def test_a_trial_keeps_its_command_files_and_last_lines() -> None:
    measurement = run_program(
        STEPS, sequence_length="1", files={"a.json": {"x": 1}, "log.txt": "y"}, environment={"A": "b c"}
    )
    assert set(measurement.files) == {"command.txt", "a.json", "rendered_log.txt", "log.txt", "last_lines.txt"}
    command = measurement.files["command.txt"].decode()
    assert "A='b c'" in command and f"{sys.executable} -c" in command and "PYTHONUNBUFFERED=1" in command
    assert len(measurement.files["last_lines.txt"].splitlines()) <= 100


def test_a_kept_command_runs_in_a_shell(tmp_path: Path) -> None:
    measurement = run_program(f"import os; print(os.environ['A'], os.getcwd())\n{STEPS}", sequence_length="1",
                      environment={"A": "b c"}, directory=str(tmp_path))  # fmt: skip
    printed = subprocess.run(measurement.files["command.txt"].decode(), shell=True, capture_output=True, text=True)
    assert printed.stdout.splitlines()[0] == f"b c {tmp_path}"


SECRET = "hunter2hunter2"


@pytest.mark.parametrize("is_failed", [False, True])
def test_no_secret_of_the_command_line_is_kept(is_failed: bool) -> None:
    """The program prints its arguments and variables in forms that name no secret beside the value."""
    program = f"import sys, os\nprint('args', sys.argv[1:], os.environ['MY_API_KEY'], flush=True)\n{STEPS}"
    program += "\nraise SystemExit('bad credentials: ' + sys.argv[2])" if is_failed else ""
    settings = {
        "run": ["{python}", "-c", escape(program), "--hf-token", SECRET],
        "environment": {"MY_API_KEY": f"{SECRET}-2"},
        "files": {"a.toml": {"log": {"wandb_api_key": SECRET}}},
        "sequence_length": "1",
        "steps": 999 if is_failed else 5,
    }
    try:
        files, texts = run_trial("command", {}, Rank(), settings).files, ""
    except ProgramFailed as error:
        files, texts = output_of(error).files, output_of(error).last_lines + str(error)
    assert is_failed == bool(texts) and {"command.txt", "a.toml", "log.txt"} <= set(files)
    assert SECRET not in texts + "".join(content.decode() for content in files.values())
    assert files["command.txt"].decode().endswith("--hf-token ***\n")


@pytest.mark.parametrize("start", ["node", "gpu"])
def test_a_plan_shows_the_command_and_its_files(start: str) -> None:
    loaded: Any = load("command")
    files = {"a.toml": {"model": {"lr": "{lr}", "hf_token": SECRET}}}
    run = ["train", "--config={output}/a.toml", "--nodes={nodes}", "--at={master_address}", "{precision}"]
    settings = loaded.Settings(run=run, files=files, start=start, options={"precision": {"bf16": ["--bf16"]}})
    command = loaded.with_settings(settings)
    machine = Machine("gpu", "sm90", 16, 8)
    text = command.preview(command.Parameters(lr="1e-4", precision="bf16"), machine)
    copies = {"node": "2 nodes", "gpu": "16 GPUs"}[start]
    assert text.startswith(f"# on the first of {copies}\ncd ") and SECRET not in text
    assert "train '--config={output}/a.toml' --nodes=2 --at=first-node bf16 --bf16" in text
    assert text.endswith('# {output}/a.toml\nmodel.lr = "1e-4"\nmodel.hf_token = "***"')
    text = command.preview(command.Parameters(lr="1e-4", precision="fp8"), machine)
    assert text == "infeasible: precision=fp8: command.options.precision has bf16"
