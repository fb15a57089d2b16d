"""The bring-up script without its hardware: valid commands, checks that end nothing but themselves, judged figures.

A stand-in for `python` answers as the checks do; only the table is made by the real one.
"""

import csv
import json
import os
import re
import shlex
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY, environment
from tests.support.amd import stand_in_environment

SCRIPT = REPOSITORY / "launch" / "amd" / "bring_up.sh"
LONGEST_S = 15 * 60

# Called with the arguments of plans, one list of them a line: prints the exit code of each plan.
PLANS = """
import json, sys
from hydra.core.global_hydra import GlobalHydra
from sweeper.__main__ import main
for line in sys.stdin:
    sys.argv = ["sweeper", *json.loads(line)]
    GlobalHydra.instance().clear()
    try:
        main()
    except SystemExit as end:
        print("exit", end.code or 0)
"""

# Prints for each check what the real command prints; the product that is compared with the cache takes too long.
PYTHON = """#!/bin/bash
best() {{ echo '{{"event": "end", "device": "AMD Instinct MI300X", "best": {{"metrics": {{'$1'}}}}}}' >&2; }}
case "$*" in
  *verdict.py*) exec {python} "$@" ;;
  *"doctor record"*) echo '{{"uuid": "12345678-9abc-def0-1234-56789abcdef0"}}' >"${{*: -1}}" ;;
  *timing_cost.py*) echo '{{"event_cost_us": 6.2, "reading_ms": 14.0, "slowdown_percent": 0.3}}' ;;
  *"sweeper doctor"*) printf '! n0 GPU 5: its power is limited\\n  amd-smi set\\n1 problem found\\n'; exit 1 ;;
  *k=3840*) sleep 30 ;;
  *m=10240*) best '"tflops": 668.4' ;;
  *m=16*) best '"tflops": 91.5' ;;
  *tf32*) best '"relative_error": 3.1e-3' ;;
  *QUEUES=8*) echo '{{"event": "trial", "reason": "OutOfMemoryError: HIP"}}' >&2; exit 1 ;;
  *llama1b*) best '"tokens_per_s": 30000' ;;
  *gpus=2*) best '"bus_gb_s": 49' ;;
  *gpus=*) echo "sweeper: gpus=8: the cluster has 2 GPUs" >&2; exit 2 ;;
esac
"""


def dry_run() -> dict[str, tuple[int, list[str]]]:
    """Return the bound in seconds and the command of each check."""
    result = subprocess.run([SCRIPT, "--dry-run", "here"], capture_output=True, text=True, check=True)
    lines = [line.split("\t") for line in result.stdout.splitlines()]
    return {name: (int(bound_s), shlex.split(command)) for name, bound_s, command in lines}


@pytest.fixture(scope="module")
def checks() -> dict[str, tuple[int, list[str]]]:
    return dry_run()


def test_all_checks_together_take_less_than_15_minutes(checks: dict[str, tuple[int, list[str]]]) -> None:
    assert sum(bound_s for bound_s, _ in checks.values()) <= LONGEST_S
    assert not Path("here").exists()  # nothing runs


def test_every_anchor_belongs_to_a_check(checks: dict[str, tuple[int, list[str]]]) -> None:
    anchors = list(csv.DictReader((SCRIPT.parent / "anchors.csv").open()))
    assert {anchor["check"] for anchor in anchors} == checks.keys() - {"record", "doctor"}
    assert all(anchor["reason"] and anchor["source"] for anchor in anchors)


@pytest.mark.long(15)
def test_every_sweep_can_be_planned_on_eight_mi300x(checks: dict[str, tuple[int, list[str]]], tmp_path: Path) -> None:
    commands = [command for _, command in checks.values() if "hardware=auto" in command]
    plans = [[*command[command.index("sweeper") + 1 :], f"dir={tmp_path}", "plan=true"] for command in commands]
    assert len(plans) >= 10
    env = environment() | {name: value for name, value in stand_in_environment().items() if name != "PYTHONPATH"}
    env["PYTHONPATH"] = os.pathsep.join([stand_in_environment()["PYTHONPATH"], env["PYTHONPATH"]])
    lines = "".join(f"{json.dumps(plan)}\n" for plan in plans)
    run = subprocess.run(
        [sys.executable, "-c", PLANS], input=lines, capture_output=True, text=True, env=env, timeout=150
    )
    assert run.stdout.count("exit 0") == len(plans), run.stdout + run.stderr
    assert "mi300x" in run.stdout.lower() and "CPU" not in run.stdout


def test_a_machine_without_the_device_gets_one_line(tmp_path: Path) -> None:
    env = {**os.environ, "KFD": str(tmp_path / "kfd")}
    result = subprocess.run([SCRIPT, tmp_path / "out"], env=env, capture_output=True, text=True)
    assert result.returncode == 2 and result.stderr.count("\n") == 1 and f"there is no {env['KFD']}" in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    """A whole run with the stand-in for python, whose bound of each check is a second."""
    path = tmp_path_factory.mktemp("bring_up")
    (path / "bin").mkdir()
    python = path / "bin" / "python"
    python.write_text(PYTHON.format(python=sys.executable))
    python.chmod(0o755)
    timeout = path / "bin" / "timeout"  # the real one, with a bound of one second
    timeout.write_text('#!/bin/bash\nexec /usr/bin/timeout "$1" 1 "${@:3}"\n')
    timeout.chmod(0o755)
    env = environment(KFD="/dev/null", HOSTNAME="gpu-node-17.example")
    env["PATH"] = f"{path / 'bin'}:{env['PATH']}"
    result = subprocess.run([SCRIPT, path / "out"], env=env, capture_output=True, text=True, timeout=60)
    return result, path / "out"


def test_a_failing_check_ends_nothing_but_itself(run: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    result, _ = run
    lines = [line for line in result.stdout.splitlines()[2:] if "  " in line]
    rows = {line.split()[0]: line for line in lines}
    verdicts = {
        name: next(word for word in ("pass", "FAIL", "noted", "not run") if word in row) for name, row in rows.items()
    }
    assert result.returncode == 1, result.stderr
    assert result.stdout.startswith("AMD Instinct MI300X\n")
    assert verdicts["record"] == verdicts["product_cold"] == verdicts["allreduce_2"] == "pass"
    assert verdicts["doctor"] == "FAIL" and "n0 GPU 5: its power is limited" in rows["doctor"]
    assert verdicts["product_warm"] == "FAIL" and "not finished after" in rows["product_warm"]
    assert verdicts["cache_cold"] == "FAIL" and "84.8" not in rows["cache_cold"] and "91.5" in rows["cache_cold"]
    assert verdicts["tf32"] == "FAIL" and "0.0031" in rows["tf32"]
    assert verdicts["allreduce_8"] == "not run" and "the cluster has 2 GPUs" in rows["allreduce_8"]
    assert verdicts["offload_queues_4"] == "noted" and "3e+04" in rows["offload_queues_4"]
    assert verdicts["offload_queues_8"] == "FAIL" and "OutOfMemoryError: HIP" in rows["offload_queues_8"]
    timing = [line for line in lines if line.startswith("timing")]
    assert ["pass" in line for line in timing] == [True, False, True]


def test_the_file_to_send_back_has_the_table_and_every_log_masked(
    run: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    result, folder = run
    with tarfile.open(f"{folder}.tar.gz") as archive:
        names = set(archive.getnames())
        texts = {name: archive.extractfile(name).read().decode() for name in names if name != "masked"}  # type: ignore[union-attr]
    assert {"masked/table.txt", "masked/machine.json", "masked/checks.tsv", "masked/fsdp8.err"} <= names
    assert texts["masked/table.txt"].strip() in result.stdout
    assert "12345678-9abc" not in "".join(texts.values()) and "masked-1" in texts["masked/machine.json"]


def test_the_page_names_every_check_and_tests_that_exist(checks: dict[str, tuple[int, list[str]]]) -> None:
    page = (REPOSITORY / "docs/guides/amd.md").read_text()
    assert not [path for path in re.findall(r"`(tests/[\w/]+\.py)", page) if not (REPOSITORY / path).exists()]
    assert not [name for name in checks if f"`{re.sub('_[48]$', '_2', name)}`" not in page]
    rows = [line.split("|")[1:-1] for line in page.partition("## What was tested")[2].splitlines() if line[:2] == "| "]
    assert len(rows) > 22 and not [row[0] for row in rows if not row[2].strip()]  # a test, or why there is none
