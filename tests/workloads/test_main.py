"""`python -m workloads` runs one trial by hand."""

import json
import subprocess
import sys
from dataclasses import fields

import pytest

from tests.conftest import environment
from workloads.__main__ import format_measurement, main
from workloads.api.contract import Measurement
from workloads.api.registry import load, names


def run_workloads(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "workloads", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=120)


def test_a_trial_prints_its_measurement() -> None:
    result = run_workloads("matmul", "m=16", "n=32", "k=8", "dtype=fp32", "warmup_s=0.5", "repeats=3")
    assert result.returncode == 0, result.stderr
    measurement = json.loads(result.stdout)
    assert {name: measurement["executed"][name] for name in ("m", "n", "k", "dtype", "warmup_s")} == {
        "m": 16,
        "n": 32,
        "k": 8,
        "dtype": "fp32",
        "warmup_s": 0.5,
    }
    assert len(measurement["step_times_s"]) == 3 and measurement["flops_per_step"] == 2 * 16 * 32 * 8


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (
            ["matmull"],
            ["matmull: unknown workload", "Available: attention, collectives, command", "Did you mean matmul?"],
        ),
        (["bandwidth"], ["bandwidth: unknown workload", "registers it in sweeper.workloads: pip install -e ."]),
        (["probe", "sleeps_s=1"], ["probe: sleeps_s: unknown key", "Available: behaviour, ", "Did you mean sleep_s?"]),
        (["precision", "tokens=16"], ["precision: recipe: required (one of bf16, "]),
        (["matmul", "m=4"], ["matmul: m, n and k have to be given"]),
        (["matmul", "m=0"], ["matmul: m=0: must be at least 1"]),
        (["parallel", "learning_rate=nan"], ["parallel: learning_rate=nan: must be finite"]),
        (["parallel", "learning_rate=inf"], ["parallel: learning_rate=inf: must be finite"]),
        (["matmul", "m=abc"], ["m=abc: must be an integer"]),
        (["matmul", "dtype=fp33"], ["dtype=fp33: must be one of fp32, tf32, fp16, bf16, "]),
        (["command", "run=x"], ["command needs settings", "python -m sweeper workload=command"]),
    ],
    ids=lambda value: value[-1],
)
def test_invalid_input_is_refused_in_two_lines(
    arguments: list[str], parts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(arguments)
    printed = capsys.readouterr()
    assert exit_info.value.code == 2 and printed.out == ""
    assert all(part in printed.err for part in parts), printed.err
    assert len(printed.err.strip().splitlines()) == 2


def test_workloads_are_listed_without_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main([])
    assert exit_info.value.code == 2
    assert capsys.readouterr().err.endswith(f"workloads: {', '.join(names())}\n")


def test_help_for_a_workload_describes_its_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["offload", "--help"])
    text = " ".join(capsys.readouterr().out.partition("parameters of offload, key=value:")[2].split())
    assert exit_info.value.code == 0
    assert " [GiB; a number, at least 0; required] " in text and " [one of replicas, sharded, ring or null;" in text
    assert all(f" {field.name} " in f" {text} " for field in fields(load("offload").Parameters))


def test_parameters_that_cannot_work_are_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["probe", "behaviour=out_of_memory"])
    err = capsys.readouterr().err
    assert exit_info.value.code == 2
    assert err.startswith("python -m workloads: probe cannot run with these parameters: ") and err.count("\n") == 1


def test_a_file_of_a_measurement_is_printed_with_its_size() -> None:
    measurement = Measurement(executed={}, step_times_s=(1.0,), files={"trace.json.gz": b"\x1f\x8b"})
    assert json.loads(format_measurement(measurement))["files"] == {"trace.json.gz": 2}
