"""Programs that are read while they run, and terminated with everything that they started."""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sweeper.metrics.derivation import derive
from tests.conftest import REPOSITORY, CommandResult, wait_for
from tests.support.programs import STEPS, escape, run_program
from workloads.api.contract import Infeasible, OutOfMemory, ParameterMismatch, ProgramFailed, Rank
from workloads.api.processes import find_marked
from workloads.api.trial import run_trial
from workloads.command import CommandSettings
from workloads.command.run import ProgramLog, measure
from workloads.formats.rate_lines import CommonLogReader


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


@pytest.mark.parametrize("is_replaced", [False, True])
def test_links_that_a_program_leaves_in_its_output_are_not_followed(tmp_path: Path, is_replaced: bool) -> None:
    """Neither a link in the folder nor one in its place."""
    other = tmp_path / "other"
    other.mkdir()
    (other / "kept").touch()
    place = "sys.argv[1]" if is_replaced else "sys.argv[1] + '/log'"
    program = f"import os, sys\nos.path.isdir({place}) and os.rmdir({place})\nos.symlink(sys.argv[2], {place})\n"
    program += f"open({str(tmp_path / 'output')!r}, 'w').write(sys.argv[1])\n{STEPS}"
    run = ["{python}", "-c", escape(program), "{output}", str(other)]
    measurement = run_program("", run=run, sequence_length="1")
    assert (other / "kept").exists() and set(measurement.files) == {"command.txt", "last_lines.txt", "log.txt"}
    Path((tmp_path / "output").read_text()).unlink(missing_ok=True)


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
        (
            "print('Memory access fault by GPU node-1 on address 0x7f'); print('Aborted'); raise SystemExit(134)",
            ProgramFailed,
            "exit code 134: Memory access fault by GPU node-1",
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
        "a fault of an AMD GPU",
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
    ("line", "settings", "metrics"),
    [
        ("step {n} loss 2 | 500 tok/s", {}, {"tokens_per_s": 500, "step_time_ms": None}),
        ("step {n} | 500 tok/s", {"global_batch": "4", "sequence_length": "25"}, {"step_time_ms": 200}),
        ("step {n} dt 20 ms, 500 tok/s", {}, {"tokens_per_s": 500, "step_time_ms": 20}),
        ("step {n} 8 samples/s", {}, {"samples_per_s": 8, "step_time_ms": None, "tokens_per_s": None}),
        ("step {n} 500 tok/sec/gpu", {}, {"tokens_per_s": 500, "step_time_ms": None}),
        ("{n} 8 it/s", {}, {"step_time_ms": 125, "tokens_per_s": None}),
    ],
)
def test_a_rate_without_a_pattern_is_enough(
    line: str, settings: dict[str, str], metrics: dict[str, float | None]
) -> None:
    program = f"for n in range(5): print({line!r}.format(n=n), flush=True)"
    run = CommandSettings(run=["{python}", "-c", escape(program)], warmup=1, steps=3, **settings)
    derived = derive([measure(run, {}, Rank())], {})
    assert {name: derived.get(name) and round(derived[name], 6) for name in metrics} == metrics


def test_a_rate_of_one_gpu_is_that_of_all_together() -> None:
    log = ProgramLog(CommonLogReader(), warmup=0, gpus=4)
    rates = [step.metrics["tokens_per_s"] for step in map(log.feed, ("5 tok/s/gpu", "5 tok/s/gpu 21 tok/s")) if step]
    assert rates == [20, 21]


@pytest.mark.parametrize(("steps", "code"), [(1, 1), (3, 0)])
def test_a_plan_runs_a_program_until_its_first_steps_and_fails_with_it(
    run_cli: Callable[..., CommandResult], tmp_path: Path, steps: int, code: int
) -> None:
    lines = "".join(f"print('step {10 * n} loss 2.5 500 tok/s', flush=True)\n" for n in range(1, steps + 1))
    wait = "raise SystemExit('no data')" if code else "import time; time.sleep(60)"
    (tmp_path / "p.py").write_text(lines + wait)
    shown = run_cli("workload=command", "command.run=['{python}',p.py]", "objective=loss", "plan=run")
    heading = "failed   " if code else "read     "
    assert shown.code == code and f"{heading}step 10: loss=2.5 tokens_per_s=500\n" in shown.out, shown
    assert ("no data" in shown.out) == bool(code)
    assert "note     loss: the last of the first 13 printed steps, after which a program is ended; for" in shown.out


def test_a_plan_fails_if_the_first_steps_lack_the_objective(
    run_cli: Callable[..., CommandResult], tmp_path: Path
) -> None:
    (tmp_path / "p.py").write_text("for n in range(5): print('step', n, '500 tok/s', flush=True)")
    words = ("workload=command", "command.run=['{python}',p.py]", "plan=run")
    shown = run_cli(*words, "objective=acc", "metrics.acc=maximize")
    assert shown.code == 1 and "step 2: tokens_per_s=500\n" in shown.out
    assert "acc was not measured; command.log.acc='REGEX' reads it from the log. Set" in shown.out
    shown = run_cli(*words, "objective=step_time_ms")
    assert shown.code == 1 and "the log has no size of a step: set command.global_batch= and" in shown.out


def test_a_loss_and_an_accuracy_are_those_of_the_last_step_memory_is_the_highest_and_a_time_the_median() -> None:
    rows = [(0.5, 2e-2, 10.0, 3.0), (0.7, 3e-4, 30.0, 9.0), (0.6, 2.4e-4, 20.0, 5.0)]
    program = f"for acc, loss, gb, ms in {rows}: print(f'acc={{acc}} loss={{loss:.1e}} mem_gb={{gb}} took {{ms}} ms')"
    log = {"step_time_ms": r"took ([\d.]+)", "loss": r"loss=([\d.]+)", "acc": r"acc=([\d.]+)", "mem_gb": r"gb=([\d.]+)"}
    run = CommandSettings(run=["{python}", "-c", escape(program)], warmup=0, steps=9, log=log)
    derived = derive([measure(run, {}, Rank())], {})
    assert (derived["acc"], derived["loss"], derived["mem_gb"]) == (0.6, 2.4e-4, 30.0)
    assert derived["step_time_ms"] == pytest.approx(5.0)
