"""`workload=command` from the command line: complete sweeps, and settings that are refused."""

import json
import re
import sqlite3
import statistics
import subprocess
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import CommandResult, Workspace, find_processes, wait_for
from tests.support.programs import STEPS
from workloads.command import CommandSettings


@pytest.mark.long(23)
def test_the_megatron_preset_runs_a_program_that_prints_a_megatron_log(workspace: Workspace) -> None:
    """Megatron-LM is not installed: a program in its place prints its log, with the degrees of its command line."""
    (workspace.path / "pretrain_gpt.py").write_text(
        "import sys\noptions = dict(a[2:].split('=') for a in sys.argv[1:] if '=' in a)\n"
        "print('  tensor_model_parallel_size ................', options['tensor-model-parallel-size'])\n" + STEPS
    )
    arguments = ["workload=megatron", "gpus=2", "hardware=cpu", "search=grid", "space.micro_batch=1", "space.cp=1"]
    arguments += ["space.global_batch=256", "space.sequence_length=128", "space.checkpointing=none", "space.pp=1"]
    arguments += ["command.model=llama_tiny", "space.tp=choice(1,2)", f"command.directory={workspace.path}"]
    result = workspace.run(*arguments)
    assert result.code == 0, result.out + result.err
    trial_runs = workspace.runs("trial")
    assert sorted(trial_run.data.params["tp"] for trial_run in trial_runs) == ["1", "2"]
    for trial_run in trial_runs:
        assert trial_run.data.metrics["tokens_per_s"] == pytest.approx(256 * 128 / 0.05)
        assert trial_run.data.metrics["tokens_per_s_per_gpu"] == pytest.approx(256 * 128 / 0.05 / 2)
        assert trial_run.data.metrics["predicted_tokens_per_s"] > 0
    (sweep_run,) = workspace.runs("sweep")
    assert sweep_run.data.metrics["predicted_error"] > 0


@pytest.mark.soak
def test_a_rank_that_prints_nothing_ends_with_the_rank_that_prints(workspace: Workspace) -> None:
    """The second of a gang's two programs prints nothing, and would wait forever for the first."""
    program = "import os, sys, time\nif os.environ['RANK'] == '1':\n    time.sleep(600)\n" + STEPS
    (workspace.path / "train.py").write_text(program)
    arguments = ["workload=command", f"command.run=['{{python}}', {workspace.path / 'train.py'}]", "command.start=gpu"]
    arguments += ["command.sequence_length='1'", "gpus=2", "budget.trials=1"]
    result = workspace.run(*arguments)
    assert result.code == 0, result.out + result.err
    (trial_run,) = workspace.runs("trial")
    assert trial_run.data.metrics["tokens_per_s_per_gpu"] == pytest.approx(256 / 0.05 / 2)


@pytest.mark.soak
def test_a_trial_that_timed_out_leaves_no_process_and_its_output_is_recorded(workspace: Workspace) -> None:
    """The program has a child in a session of its own."""
    child = "import time, sys; sys.stdout.close(); time.sleep(601)"
    program = (
        f"import subprocess, sys, time\nsubprocess.Popen([sys.executable, '-c', {child!r}], start_new_session=True)\n"
    )
    (workspace.path / "train.py").write_text(program + "print('so far so good', flush=True)\ntime.sleep(602)\n")
    arguments = ["workload=command", f"command.run=['{{python}}', {workspace.path / 'train.py'}]", "trial.timeout_s=3"]
    result = workspace.run(*arguments, "budget.trials=1", "command.environment.OF_THIS_TEST=timed_out")
    assert result.code == 1 and "took longer than trial.timeout_s=3" in result.out + result.err
    wait_for(lambda: not find_processes("OF_THIS_TEST", "timed_out"), 20)
    (trial,) = workspace.trials()
    record = trial.user_attrs["record"]
    assert record["status"] == "timed_out" and "so far so good" in record["detail"]


@pytest.mark.long(25)
def test_steps_are_recorded_while_a_trial_runs_and_poor_trials_are_pruned(workspace: Workspace) -> None:
    """Five programs of nearly the same speed; the two after them are ten times slower and are pruned."""
    program = "import sys, time\nfor n in range(40):\n    time.sleep(0.03)\n    print('took', sys.argv[1])\n"
    (workspace.path / "train.py").write_text(program)
    folder = workspace.path / "custom" / "workload"
    folder.mkdir(parents=True)
    settings = {"run": ["{python}", str(workspace.path / "train.py"), "{ms}"], "log": {"step_time_ms": r"took (\d+)"}}
    settings |= {"steps": 35, "global_batch": "1", "sequence_length": "1"}
    config = {"workload": {"name": "command", "objective": "tokens_per_s", "direction": "maximize"}}
    config |= {"command": settings, "space": {"ms": "choice(10, 11, 12, 13, 14, 100, 101)"}, "finals": {"top": 0}}
    (folder / "custom.yaml").write_text("# @package _global_\n" + yaml.safe_dump(config))
    arguments = ["--config-dir", str(folder.parent), "workload=custom", "search=grid", "search.pruner=median"]
    process = workspace.start(*arguments)
    wait_for(lambda: steps_of_running_trials(workspace.path / "mlflow.db"))
    out, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    assert "5 complete, 2 pruned" in out
    pruned = [trial_run for trial_run in workspace.runs("trial") if trial_run.data.tags["outcome"] == "pruned"]
    assert {trial_run.data.params["ms"] for trial_run in pruned} == {"100", "101"}
    check_winner_runs_again(workspace)


def check_winner_runs_again(workspace: Workspace) -> None:
    """The script that the sweep keeps of its winner runs the program without this project, to the same figure."""
    best = workspace.sweeps[0] / "best"
    result = json.loads((best / "best.json").read_text())
    assert result["parameters"]["ms"] == 10 and result["software"]["python"]
    again = subprocess.run(["sh", str(best / "program" / "run.sh")], capture_output=True, text=True, timeout=60)
    times_ms = [float(line.split()[1]) for line in again.stdout.splitlines()]
    assert len(times_ms) == 40
    assert 1e3 / statistics.median(times_ms) == pytest.approx(result["result"]["value"], rel=0.15)


def steps_of_running_trials(store: Path) -> list[Any]:
    """Read the database without MLflow, which would create its tables at the same time as the tracking process."""
    with suppress(sqlite3.OperationalError), closing(sqlite3.connect(f"file:{store}?mode=ro", uri=True)) as database:
        return database.execute(
            "select value from latest_metrics join runs using (run_uuid) "
            "where key = 'steps/tokens_per_s' and status = 'RUNNING'"
        ).fetchall()
    return []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "command.run: required"),
        (["command.run=[x,'{lr}']"], "space.lr: required"),
        (["command.run='python3 a/no.py --lr=3'"], "/a/no.py: no such file"),
        (["command.run=[no-such-program]"], "command.run: no-such-program: no such program"),
        (["command.run=[echo]", "command.directory=/no/such"], "command.directory=/no/such: no such directory"),
        (["command.run=[x]", "space.lr=3"], "space.lr: the command has no {lr}"),
        (["command.run=[x]", "command.log={loss: 'a (b) (c)'}"], "has 2 groups, it needs exactly one"),
        (["command.run=[x]", "command.log={loss: 'a (b)'}"], "has none of step_time_s"),
        (["command.run=[x]", "command.stepps=3"], "Did you mean command.steps?"),
        (["workload=probe", "command.run=[x]"], "probe runs no command"),
        (["command.run=[x]", "command.model=llama3-8b"], "command: model=llama3-8b: it has to be one of"),
        (["command.run=[x]", "command.layout={tpp: 2}"], "layout.tpp: unknown key, allowed are dp_replicate"),
        (["command.run=[x]", "command.layout={tp: 2}"], "layout: needs global_batch as well"),
        (["command.run=[x]", "command.trainer=megatorn"], "trainer=megatorn: it has to be one of own, torchtitan"),
        (["workload=probe", "search.pruner=median"], "probe reports no steps while it runs"),
    ],
    ids=str,
)
def test_invalid_settings_are_refused_before_anything_starts(
    run_cli: Callable[..., CommandResult], arguments: list[str], message: str
) -> None:
    if not any("workload=" in argument for argument in arguments):
        arguments = ["workload=command", *arguments]
    result = run_cli(*arguments)
    assert result.code == 2 and message in result.err, result.err
    assert len(result.err.splitlines()) <= 2


@pytest.mark.parametrize("name", ["../a", "/a", "a/b", "..", ".", "", "a\0"])
def test_a_file_of_a_command_has_a_name_and_no_folder(name: str) -> None:
    with pytest.raises(ValueError, match="must be the name of a file, without a folder"):
        CommandSettings(run=["x"], files={name: "text"})


@pytest.mark.parametrize("name", ["<b>", "a b", "=1", "\x1b[31m", ""])
def test_a_metric_of_a_log_has_a_name_that_every_store_takes(name: str) -> None:
    with pytest.raises(ValueError, match="a metric's name has letters, digits"):
        CommandSettings(run=["x"], log={"step_time_s": "t (.*)", name: "a (.*)"})


def test_a_limit_that_excludes_every_trial_removes_the_files_of_the_winner(workspace: Workspace) -> None:
    steps = "range(6 if sys.argv[1] == 'short' else 9)"
    program = f"import sys\nfor n in {steps}: print(f'step {{n}} loss {{9 - n}} 500 tok/s', flush=True)"
    (workspace.path / "p.py").write_text(program)
    words = ["workload=command", "command.run=['{python}',p.py,'{k}']", f"command.directory={workspace.path}"]
    words += ["command.steps=20", "command.warmup=1", "objective=loss", "search=grid", "name=s", "hardware=cpu"]
    words += ["space.k=short,long,nan", "finals.top=0"]
    first = workspace.run(*words, "budget.gpu_hours=1e-6").out.replace("\\\n", "")
    used = re.search(r"ended    by budget.gpu_hours=1e-06 \(([\de.-]+) used\)", first)
    extended = re.search(r"extend .* budget.gpu_hours=([\de.-]+)", first)
    assert used and extended and float(extended[1]) > float(used[1]), first
    best = workspace.path / "sweeps" / "s" / "best"
    second = workspace.run(*words)
    assert second.code == 0 and best.is_dir() and "again    python -m sweeper best s" in second.out
    assert "loss of unequal training is ranked: trials have 5 to 8 timed steps" in second.out
    third = workspace.run(*words, "limits.loss=0.5")
    assert "no trial keeps limits.loss" in third.out and "again " not in third.out and not best.exists()
