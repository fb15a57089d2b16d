"""`workload=command`: real programs, read while they run, and terminated with everything that they started."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import REPOSITORY, CommandResult, Workspace, find_processes, wait_for
from tests.support.programs import STEPS, escape, run_program
from workloads.api.contract import (
    Infeasible,
    Machine,
    OutOfMemory,
    ParameterMismatch,
    ProgramFailed,
    Rank,
    output_of,
)
from workloads.api.registry import load
from workloads.api.trial import run_trial
from workloads.command.guard import find_marked
from workloads.command.template import fill, render

# ── templates ──

TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=30)


@given(TEXTS)
def test_a_value_stays_one_argument_of_the_shell(value: str) -> None:
    line = fill("printf %s {x} {x}", {"x": value}, shell=True)
    printed = subprocess.run(["/bin/sh", "-c", line], capture_output=True).stdout
    assert printed == 2 * value.encode()


@given(
    st.dictionaries(st.text("abc_.", min_size=1, max_size=4), TEXTS | st.integers(-9, 9) | st.booleans(), min_size=1)
)
def test_a_rendered_file_has_exactly_the_values(contents: dict[str, Any]) -> None:
    template = {"outer": {name: f"{{x{n}}}" for n, name in enumerate(contents)}}
    values = {f"x{n}": value for n, value in enumerate(contents.values())}
    for name, parse in (("a.json", json.loads), ("a.toml", tomllib.loads), ("a.yaml", yaml.safe_load)):
        assert parse(render(name, template, values)) == {"outer": contents}


# ── programs ──


def test_a_program_ends_after_enough_steps_and_warm_up_steps_are_not_measured() -> None:
    started = time.monotonic()
    measurement = run_program(STEPS, sequence_length="128")
    assert measurement.step_times_s == pytest.approx([0.05] * 5) and measurement.tokens_per_step == 256 * 128
    assert measurement.metrics["loss"] == pytest.approx(5 / 8)
    assert measurement.metrics["claimed_tflops_per_gpu"] == 1
    assert b"iteration" in measurement.files["log.txt"] and time.monotonic() - started < 10


def test_a_program_and_its_children_end_with_the_trial(tmp_path: Path) -> None:
    """The child is in a session of its own and ignores SIGTERM."""
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    program = (
        f"import subprocess, sys; c = subprocess.Popen([sys.executable, '-c', {stubborn!r}], start_new_session=True)"
        f"; open({str(tmp_path / 'pid')!r}, 'w').write(str(c.pid))\n{STEPS}"
    )
    run_program(program, sequence_length="1")
    assert int((tmp_path / "pid").read_text()) not in find_marked("SWEEPER_PROGRAM=", -1)


def test_a_program_does_not_outlive_a_worker_that_is_killed(tmp_path: Path) -> None:
    script = "import os, sys, time\nprint('begun', flush=True)\nos.chdir(sys.argv[1])\n"
    script += "open(sys.argv[2], 'w').write(f'{os.getpid()} {os.getcwd()}')\ntime.sleep(600)"
    worker = subprocess.Popen(
        [sys.executable, "-c", "import sys; from workloads.api.trial import run_trial as run; "
         "from workloads.api.contract import Rank; "
         "run('command', {}, Rank(), {'run': ['{python}', '-c', sys.argv[1], '{output}', sys.argv[2]]})",
         script, str(tmp_path / "workspace")],
        cwd=REPOSITORY,
    )  # fmt: skip
    workspace = tmp_path / "workspace"
    wait_for(lambda: workspace.exists() and workspace.read_text())
    program, output = int(workspace.read_text().split()[0]), Path(workspace.read_text().split()[1])
    assert program in find_marked("SWEEPER_PROGRAM=", -1) and output.exists()
    worker.kill()
    worker.wait()
    wait_for(lambda: program not in find_marked("SWEEPER_PROGRAM=", -1) and not output.exists())


def test_parameters_placeholders_and_variables_reach_the_program() -> None:
    program = """
import json, os, sys, tomllib
config = tomllib.load(open(sys.argv[1] + "/a.toml", "rb"))
assert (sys.argv[2], os.environ["MODE"], config["a"]["lr"]) == ("x y", "fast", 0.5), (sys.argv, config)
assert (os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["MASTER_PORT"]) == ("1", "2", "4242")
"""
    measurement = run_trial(
        "command",
        {"name": "x y", "lr": 0.5, "fast": True, "mode": "fast"},
        Rank(1, 2, rendezvous="127.0.0.1:4242"),
        {
            "run": ["{python}", "-c", escape(program + STEPS), "{output}", "{name}"],
            "start": "gpu",
            "files": {"a.toml": {"a": {"lr": "{lr}", "fast": "{fast}"}}},
            "environment": {"MODE": "{mode}"},
        },
    )
    assert measurement.executed == {"name": "x y", "lr": 0.5, "fast": True, "mode": "fast"}


def test_the_first_rank_of_a_node_starts_one_program_for_the_node() -> None:
    second = run_program("raise SystemExit(3)", Rank(1, 2, ranks_per_node=2, local_rank=1))
    assert second.step_times_s == () and second.of_gang
    program = f"import os; assert 'RANK' not in os.environ\n{STEPS}"
    assert run_program(program, Rank(0, 2, ranks_per_node=2), sequence_length="1").step_times_s
    with pytest.raises(Infeasible, match="3 ranks are not spread evenly over 2 nodes"):
        run_program(program, Rank(0, 3, ranks_per_node=1, nodes=2))


@pytest.mark.parametrize(
    ("program", "error", "message", "changes"),
    [
        ("print('CUDA out of memory. Tried'); import time; time.sleep(99)", OutOfMemory, "out of memory", {}),
        ("print('begun', flush=True); import time; time.sleep(99)", ProgramFailed, "nothing for 1 s", {"silence_s": 1}),
        ("print('a last word'); raise SystemExit(7)", ProgramFailed, "exit code 7: a last word", {}),
        ("print('a last word\\n====='); raise SystemExit(7)", ProgramFailed, "exit code 7: a last word", {}),
        (
            "print('cannot open file: [Errno 2] No such'); print('torchrun says more'); raise SystemExit(1)",
            ProgramFailed,
            "exit code 1: cannot open file",
            {},
        ),
        (
            "print('x.SomeError: no luck'); print(9 * '='); raise SystemExit(1)",
            ProgramFailed,
            "exit code 1: x.SomeE",
            {},
        ),
        ("import os; os.kill(os.getpid(), 9)", ProgramFailed, "SIGKILL", {}),
        ("print('all well')", ProgramFailed, "no line of its", {}),
        ("print('step 1')", ProgramFailed, "matches log.step_time_s", {"log": {"step_time_s": "took ([0-9.]+)"}}),
        ("print('took .')", ProgramFailed, "no line of its", {"log": {"step_time_s": "took ([0-9.]+)"}}),
        (STEPS, Infeasible, "8 seqs: it has to be a whole number", {"global_batch": "8 seqs"}),
        (STEPS.replace("200", "3"), ProgramFailed, "after 2 steps, all of them warm-up", {}),
    ],
    ids=[
        "out of memory",
        "silent",
        "exit",
        "a rule below",
        "no program",
        "an error",
        "killed",
        "no steps",
        "no match",
        "no number",
        "no batch",
        "warm-up only",
    ],
)
def test_every_failure_has_its_reason(
    program: str, error: type[Exception], message: str, changes: dict[str, Any]
) -> None:
    started = time.monotonic()
    with pytest.raises(error, match=message):
        run_program(program, **changes)
    assert time.monotonic() - started < 10


def test_a_program_that_has_ended_is_not_waited_for_if_its_child_holds_the_output() -> None:
    program = STEPS + "\nimport subprocess; subprocess.Popen(['sleep', '60'])\n"
    started = time.monotonic()
    measurement = run_program(program, sequence_length="1", steps=190)
    assert len(measurement.step_times_s) == 190 and time.monotonic() - started < 20


def test_a_program_that_ended_is_not_waited_for_while_its_child_prints() -> None:
    child = "import time\nwhile True: print('monitor', flush=True); time.sleep(0.2)"
    program = STEPS + f"\nimport subprocess; subprocess.Popen([sys.executable, '-c', {child!r}])\n"
    started = time.monotonic()
    assert len(run_program(program, sequence_length="1", steps=190).step_times_s) == 190
    assert time.monotonic() - started < 20


def test_a_line_of_32_megabytes_is_read_within_10_seconds() -> None:
    program = "import sys\nfor _ in range(320): sys.stdout.write('x' * 100_000)\nprint()\n" + STEPS
    started = time.monotonic()
    assert run_program(program, sequence_length="1").step_times_s
    assert time.monotonic() - started < 10


def test_a_program_that_reports_another_parameter_fails_the_trial() -> None:
    program = "print('  tensor_model_parallel_size ........... 4')\n" + STEPS
    with pytest.raises(ParameterMismatch, match="tp=4, requested 2"):
        run_program(program, parameters={"tp": 2}, environment={"T": "{tp}"})


def test_a_missing_program_is_named() -> None:
    with pytest.raises(ProgramFailed, match="/no/such/trainer: No such file"):
        run_trial("command", {}, Rank(), {"run": ["/no/such/trainer"]})


@pytest.mark.parametrize(
    ("program", "changes", "reason"),
    [
        (STEPS.replace("loss=5 / n", "loss=5 / n if n < 5 else float('nan')"), {}, "loss is nan at step 5"),
        (STEPS.replace("loss=5 / n", "loss=float('-inf')"), {}, "loss is infinite at step 1"),
        ("print('step:  7  loss:      nan  memory:  1.41GiB(1.79%)  tps: 193,831')", {}, "loss is nan at step 7"),
        ("print({'loss': float('nan'), 'grad_norm': 1.0})", {}, "loss is nan at step 1"),
        (
            "[print(f'took 5 ms loss={v}') for v in ('1.5', 'nan')]",
            {"log": {"step_time_ms": r"took (\d+)", "loss": r"loss=([\d.]+)"}},
            "loss is nan at step 2",
        ),
        (
            "[print(f'took 5 ms, objective {v}') for v in ('1.5', 'nan')]",
            {"log": {"step_time_ms": r"took (\d+)", "loss": r"objective (\S+)"}},
            "loss is nan at step 2",
        ),
    ],
    ids=["Megatron-LM", "infinite", "torchtitan", "a dict", "log without nan", "log with nan"],
)
def test_a_loss_that_is_no_number_fails_the_trial(program: str, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ProgramFailed, match=f"^{reason}$"):
        run_program(program, sequence_length="1", **changes)


@pytest.mark.parametrize("line", ["grad norm: nan", "eval loss: nan", "val_loss: nan", "loss scale: inf"])
def test_only_the_training_loss_ends_a_trial(line: str) -> None:
    assert run_program(f"print({line!r})\n{STEPS}", sequence_length="1").step_times_s


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


# ── presets ──


def test_only_valid_layouts_of_a_command_with_layout_are_tried() -> None:
    loaded: Any = load("command")
    layout = {"tp": "{tensor}", "pp": "{pipeline}"}
    settings = {"run": ["x"], "layout": layout, "global_batch": "64", "sequence_length": "8192", "model": "llama3_8b"}
    command = loaded.with_settings(loaded.Settings(**settings))
    machine = Machine("gpu", "sm90", 8, 8, 131.0, {"bf16": 690.0}, link_gb_s=450.0)

    def unsupported_reason(tensor: int, pipeline: int, machine: Machine = machine) -> str:
        return str(command.estimate(command.Parameters(tensor=tensor, pipeline=pipeline), machine).unsupported_reason)

    assert unsupported_reason(2, 1) == unsupported_reason(4, 2) == ""
    assert "= 6 ranks, but there are 8" in unsupported_reason(3, 2) and "16 ranks" in unsupported_reason(16, 1)
    assert "tp=0, it has to be a whole number" in unsupported_reason(0, 1)
    three_ranks = Machine("gpu", "sm90", 3, 8, 131.0, {"bf16": 690.0})
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

    make_text(workspace.path)
    arguments = [f"space.assets={workspace.path}/assets", f"space.dataset_path={workspace.path}/text"]
    arguments += ["space.micro_batch=2", "space.checkpointing=none", "gpus=1"]
    result = workspace.run("workload=torchtitan_debug", "search=grid", "progress=never", *arguments)
    assert result.code == 0, result.out + result.err
    (trial_run,) = workspace.runs("trial")
    assert trial_run.data.metrics["tokens_per_s"] > 0 and trial_run.data.metrics["steps"] == 10


# ── the command line ──


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
    record = json.loads(trial.user_attrs["record"])
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
        (["command.run=[no-such-program]"], "command.run: no-such-program: no such program"),
        (
            ["command.run=[echo]", "command.directory=/no/such"],
            "command.directory=/no/such: no such directory",
        ),
        (["command.run=[x]", "space.lr=3"], "space.lr: the command has no {lr}"),
        (["command.run=[x]", "command.log={loss: 'a (b) (c)'}"], "has 2 groups, it needs exactly one"),
        (["command.run=[x]", "command.log={loss: 'a (b)'}"], "has none of step_time_s"),
        (["command.run=[x]", "command.stepps=3"], "Did you mean command.steps?"),
        (["workload=probe", "command.run=[x]"], "probe runs no command"),
        (["command.run=[x]", "command.model=llama3-8b"], "command: model=llama3-8b: it has to be one of"),
        (["command.run=[x]", "command.layout={tpp: 2}"], "layout.tpp: unknown key, allowed are dp_replicate"),
        (["command.run=[x]", "command.layout={tp: 2}"], "layout: needs global_batch as well"),
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
