"""Sweeps from Python: results, errors, and a Ctrl-C."""

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest

import sweeper
from sweeper.notebook.result import read_result, unit_of_column
from tests.conftest import Workspace, environment, wait_for
from tests.sweeper.conftest import FinishedSweep


def python(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=170)


def test_importing_sweeper_loads_next_to_nothing(tmp_path: Path) -> None:
    code = "import sys; before = set(sys.modules); import sweeper; print(len(set(sys.modules) - before)); "
    code += "sweeper.run; print(any(name in sys.modules for name in ('torch', 'ray', 'optuna', 'mlflow', 'pandas')))"
    loaded, heavy = python(code, tmp_path).stdout.split()
    assert int(loaded) < 60 and heavy == "False"  # importlib.util and pathlib are most of it


def test_every_public_name_is_there() -> None:
    assert all(getattr(sweeper, name) is not None for name in sweeper.__all__)
    assert set(sweeper.__all__) <= set(dir(sweeper))
    with pytest.raises(AttributeError, match="no attribute 'runn'"):
        sweeper.runn  # noqa: B018


@pytest.mark.long(30)
@pytest.mark.xdist_group("finished_sweep")
def test_a_result_has_the_winner_and_all_trials_with_units(finished_sweep: FinishedSweep) -> None:
    result = read_result(finished_sweep.workspace.sweeps[0])
    assert (
        result.best is not None and result.best.rounds == 5 and result.best.low < result.best.value < result.best.high
    )
    assert result.best.params.items() >= {"n": 256, "dtype": "fp32"}.items() and result.objective == "tflops"
    trials = result.trials
    assert isinstance(trials, pd.DataFrame) and len(trials) == 8 and len(result.remeasured) == 3 * 5
    assert set(trials["outcome"]) == {"complete"} and trials["param.n"].eq(256).all()
    assert trials.loc[result.best.trial, "param.m"] == result.best.params["m"]
    assert set(result.remeasured["round"]) == {*range(5)} and len(set(result.remeasured["remeasured_trial"])) == 3
    assert {"tflops": "TFLOP/s", "step_time_ms": "ms", "tflops_ci_low": "TFLOP/s"}.items() <= trials.attrs[
        "units"
    ].items()
    assert trials.attrs["units"]["param.warmup_s"] == "seconds" and "mfu" not in trials.attrs["units"]
    texts = list[str]()
    ended = replace(result, summary="again    python -m sweeper best p\nwinner   trial 0")
    ended._repr_pretty_(SimpleNamespace(text=texts.append), False)
    assert texts == ["again    !python -m sweeper best p\nwinner   trial 0"]
    html = result._repr_html_()
    assert (
        html.count("<table>") == 2 and html.count("<circle") == 8 and "<th>95% from</th>" in html
    )  # trials and finals
    assert "rate TFLOP/s over the trials" in html and "8 complete" in html
    stored = sweeper.load_results(f"sqlite:///{finished_sweep.workspace.path}/mlflow.db", sweep="products")
    assert len(stored.trials) == 8 and len(stored.sweeps) == 1


def test_units_are_those_of_the_stored_values() -> None:
    units = {
        name: unit_of_column(name) for name in ("mfu", "tokens_per_s_per_gpu", "param.budget_gib", "score", "cost")
    }
    assert units == {"mfu": "", "tokens_per_s_per_gpu": "tokens/s", "param.budget_gib": "GiB", "score": "", "cost": ""}


def test_errors_are_exceptions_with_the_messages_of_the_command(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(workspace.path)
    with pytest.raises(sweeper.UserInputError, match=r"^workload=matmull: .*Did you mean"):
        sweeper.run("workload=matmull")
    with pytest.raises(sweeper.UserInputError, match=r"^plan=run: .*: \S+ -m sweeper workload=probe plan=run$"):
        sweeper.run("plan=run", workload="probe")
    with pytest.raises(sweeper.UserInputError, match="the first argument is a function; give one of them"):
        sweeper.run(print, workload="probe")
    with pytest.raises(sweeper.UserInputError, match="a function comes first"):
        sweeper.run("budget.trials=2", print)  # type: ignore[arg-type]
    with pytest.raises(sweeper.UserInputError, match="the store does not exist"):
        sweeper.load_results("sqlite:///nothing.db")


def test_layouts_are_planned_from_python() -> None:
    answer = sweeper.plan_layouts("model=llama3_8b", hardware="h100", gpus=8, tp=2)
    assert answer.best.layout.tp == 2 and answer.best.layout.gpus == 8
    with pytest.raises(sweeper.UserInputError, match="gpu: unknown key"):
        sweeper.plan_layouts("model=llama3_8b", hardware="h100", gpu=8)


FUNCTION = """
import sweeper
peak = 3
def score(x, rank, step_s=0.01):
    if x == 4:
        raise sweeper.Infeasible("four is too much")
    return {"score": -(x - peak) ** 2 + rank.world_size, "step_times_s": [step_s] * 5, "tokens_per_step": 10}
words = ("hardware=cpu", "gpus=2", "search=grid", "workload.objective=score", "finals.rounds=2", "progress=never")
result = sweeper.run(score, *words, space={"x": range(0, 5)})
print(result.best.params["x"], result.best.value, result.trials.loc[0, "tokens_per_s"], result.trials.loc[4, "outcome"])
print(result.folder / "best" / "sweep.sh")
"""


@pytest.mark.soak  # its parts are tested above; this one has two ranks, a refusal, finals, and the winner again
def test_a_function_runs_as_a_workload(workspace: Workspace) -> None:
    done = python(FUNCTION, workspace.path)
    assert done.stdout.split()[:4] == ["3", "2.0", "2000.0", "infeasible"], done.stdout + done.stderr
    script = done.stdout.split()[4]
    again = subprocess.run(["sh", script], cwd=workspace.path, env=environment(), capture_output=True, text=True)
    assert again.returncode == 0 and "1 complete" in again.stdout, again.stderr
    assert {run.data.metrics["score"] for run in workspace.runs("trial") if run.data.params["x"] == "3"} == {2.0}


@pytest.mark.soak
def test_a_ctrl_c_ends_the_sweep_in_order_and_the_same_call_resumes_it(workspace: Workspace) -> None:
    code = "import sweeper, time\ndef wait(x):\n    time.sleep(0.5)\n    return x\nsweeper.run('search=grid', "
    code += "'finals.top=0', 'name=waits', workload=wait, space={'x': range(0, 20)})\n"
    command = [sys.executable, "-c", code]
    process = subprocess.Popen(command, cwd=workspace.path, env=environment(), stderr=subprocess.PIPE, text=True)
    journal = workspace.path / "sweeps/waits/study.journal"
    wait_for(lambda: journal.exists() and '"record"' in journal.read_text(), 120)
    time.sleep(0.2)
    process.send_signal(2)
    _, err = process.communicate(timeout=120)
    assert process.returncode != 0 and err.rstrip().endswith("KeyboardInterrupt") and "stopping" in err
    interrupted = read_result(workspace.path / "sweeps/waits")
    assert 0 < len(interrupted.trials) < 20 and interrupted.best is not None
    code = code.replace("sweeper.run(", "result = sweeper.run(")
    done = python(code + "print(result.trials.outcome.eq('complete').sum())", workspace.path)
    assert done.stdout.strip() == "20", done.stderr


@pytest.mark.long(40)
def test_a_function_that_reports_its_steps_is_pruned_by_successive_halving(tmp_path: Path) -> None:
    code = "import sweeper, time\ndef train(x, report):\n    for step in range(12):\n        time.sleep(0.1)\n"
    code += (
        "        report(x)\n    return x\nresult = sweeper.run('search=grid', 'search.pruner=asha', 'finals.top=0', "
    )
    code += "'search.min_steps=2', 'hardware=cpu', workload=train, space={'x': [9, 8, 7, 6]})\n"
    code += "print(result.best.params['x'], *sorted(result.trials['outcome']))"
    result = python(code, tmp_path)
    assert result.stdout.split()[-5:] == ["9", "complete", "pruned", "pruned", "pruned"], result.stderr
