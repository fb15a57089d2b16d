"""Random command lines, configuration files and imports end with a line and a documented exit code."""

import os
import random
import sys
from pathlib import Path

import pytest

from tests.support import fuzz_runner
from tests.support.fuzz_runner import import_entry, plan_entry, run_cases, run_processes
from tests.support.fuzzing import Case, random_command, random_import

SEED = 26


def misbehave() -> None:
    """Do what the only argument names."""
    match sys.argv[1]:
        case "raise":
            raise ValueError("told to")
        case "return":
            return
        case "write":
            Path("../../outside").touch()
        case "exit":
            sys.exit(7)
        case "die":
            os._exit(3)
        case "print":
            print("Traceback (most recent call last):")
        case "loop":
            while True:
                pass
    sys.exit(0)


def test_the_runner_finds_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz_runner, "CPU_LIMIT_S", 0.2)
    words = ("raise", "good", "return", "write", "exit", "die", "good", "print", "loop")
    folder = tmp_path / "a" / "b"
    folder.mkdir(parents=True)
    failures = run_cases(misbehave, "test", [Case([word]) for word in words], folder)
    assert [failure.case.words[0] for failure in failures] == [word for word in words if word != "good"]
    starts = ["raises", "returned", "writes", "exit code 7", "ended its", "prints a", "takes more"]
    assert [failure.reason.startswith(start) for failure, start in zip(failures, starts, strict=True)] == [True] * 7


def test_random_imports_end_with_a_line(tmp_path: Path) -> None:
    rng = random.Random(SEED)
    assert not run_cases(import_entry(), "sweeper ingest", [random_import(rng) for _ in range(40)], tmp_path)


def test_random_command_lines_end_with_a_line(tmp_path: Path) -> None:
    rng = random.Random(SEED)
    assert not run_cases(plan_entry(), "sweeper", [random_command(rng) for _ in range(15)], tmp_path)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_many_random_imports_end_with_a_line(tmp_path: Path) -> None:
    rng = random.Random(SEED + 1)
    assert not run_cases(import_entry(), "sweeper ingest", [random_import(rng) for _ in range(2000)], tmp_path)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_many_random_command_lines_end_with_a_line(tmp_path: Path) -> None:
    rng = random.Random(SEED + 1)
    assert not run_cases(plan_entry(), "sweeper", [random_command(rng) for _ in range(1000)], tmp_path)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
def test_random_command_lines_as_whole_processes(tmp_path: Path) -> None:
    rng = random.Random(SEED + 2)
    assert not run_processes([random_command(rng) for _ in range(20)], tmp_path)
