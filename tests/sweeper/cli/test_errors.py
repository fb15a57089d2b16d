"""Invalid input gets one or two lines and exit code 2, and nothing is started."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sweeper.cli.exits import StopRequests, exit_with
from sweeper.execution import cluster
from tests.conftest import CommandResult, environment
from workloads.api import host

WRONG = {
    "workload=matmull": ["workload=matmull", "unknown workload 'matmull'", "Did you mean matmul?"],
    "hardware=h2000": ["hardware=h2000", "Did you mean h200?"],
    "search=magic": ["search=magic", "cmaes, gp, grid, nsga2, qmc, random, tpe"],
    "budget.trails=5": ["budget.trails", "Did you mean budget.trials?"],
    "bugdet.trials=5": ["bugdet.trials", "Did you mean budget.trials?"],
    "trainer=megatron": ["trainer: unknown key", "`sweeper plan` has it"],
    "+foo=1": ["foo", "workload"],
    "budget.trials=ten": ["budget.trials=ten", "an integer"],
    "budget.trials=inf": ["budget.trials=inf", "finite"],
    f"budget.cost=1{400 * '0'}": ["budget.cost", "between -2^63 and 2^63"],
    f"space.m=range(1,1{400 * '0'})": ["space.m=range(1,10000", "between -2^63 and 2^63"],
    "workload=probe space.x=interval(0,1e30)": ["space.x=interval(0,1e30)", "between -2^63 and 2^63"],
    "trial.grace_s=nan": ["trial.grace_s=nan", "finite"],
    "space.m=choice(64.5,128)": ["space.m=64.5", "an integer"],
    "budget=[1]": ["budget=[1]: must be a mapping"],
    "budget=3": ["budget=3: must be a mapping", "Did you mean budget.trials=3?"],
    "llama_tiny": ["llama_tiny: must be group=choice", "Did you mean workload=llama_tiny?"],
    "workload=llama8b hardware=b200": ["hardware=b200: not in the cluster", "plan=true", "cluster.address="],
    "budget.trials=0": ["budget.trials=0", "at least 1"],
    "progress=loud": ["progress=loud", "auto, always, never, json"],
    "name=../x": ["name=../x", "letters, digits"],
    "budget.trials=null": ["budget", "never end"],
    "budget.cost=100": ["budget.cost=100", "price_per_hour", "budget.gpu_hours"],
    "retry=broken": ["retry=broken", "failed, infeasible, inconclusive, lost, all"],
    "space.q=3": ["space.q", "unknown parameter", "Available: accumulation, backend, dtype, k, layer"],
    "space.m=foo": ["space.m=foo", "an integer"],
    "space.dtype=fp7": ["space.dtype=fp7", "fp32, tf32, fp16, bf16"],
    "space.dtype=mxfp8 hardware=cpu": ["space.dtype=mxfp8", "emulated", "cpu lacks"],
    "search.initial_points=[{m:100}]": ["search.initial_points", "m=100", "space.m is range(128"],
    "workload=llama_tiny space.data=/no/such": ["space.data=/no/such", "no such file"],
    "space.backend=triton hardware=cpu": ["space.backend=triton", "for GPUs"],
    "model=llama3_9b": ["model=llama3_9b", "Did you mean llama3_8b?"],
    "workload=matmul_layers space.m=64": ["space: m and model"],
    "space.n=null": ["space: m, n and k have to be given"],
    "space.m=range(10,5)": ["space.m=range(10,5)", "empty"],
    "space.m=range(0,100,10)": ["space.m=0", "at least 1"],
    "space.m=interval(1,5)": ["space.m=interval", "range or a choice"],
    "space.m=choice(": ["space.m=choice(", "cannot be parsed"],
    "search.initial_points=[{m:128,z:2}]": ["search.initial_points", "unknown parameter z"],
    "gpus=all hardware=cpu": ["gpus=all", "no GPUs", "number of processes"],
    "gpus=most": ["gpus=most", "an integer or one of all"],
    "workload=precision gpus=2": ["gpus=2", "spans at most 1"],
    "workload=collectives": ["gpus=1", "needs at least 2"],
    "plan=run": ["plan=run: matmul runs no program", "plan=true"],
    "calibration=nofile.yaml": ["calibration=nofile.yaml", "there is no"],
    "retry=failed name=nothing": ["retry=failed", "there is no sweep nothing"],
    "seed=1k": ["seed=1k", "an integer. Write 1e3 or 1024"],
    "workload=probe gpus=99999": ["gpus=99999", "the cluster has"],
    "cluster.max_concurrent_trials=99999": ["cluster.max_concurrent_trials=99999", "at most"],
    "hardware=mi355x": ["hardware=mi355x", "not in the cluster", "hardware=cpu"],
    "workload=probe search=grid": ["space.x", "no grid"],
    "objective=[tflop,mfu]": ["unknown metric tflop", "Did you mean tflops?", "metrics.tflop=minimize or maximize"],
    "objective=tflops,mfu space.m=64,128": ["add -m to run one sweep for each, with space.m='choice(64,128)'"],
    "objective=tflops,mfu": ["objective=[tflops,mfu] for their Pareto front", "add -m"],
    "limits.tflops=choice(5,6)": ["sweeper: limits.tflops=choice(5,6): several values; add -m"],
    "limits.tflop=5": ["limits.tflop", "unknown metric", "Did you mean tflops?"],
    "objective=[tflops,step_time_ms] search=cmaes": ["search=cmaes", "takes one objective", "nsga2"],
    "-m hydra/launcher=joblib seed=1,2": ["hydra/launcher=joblib", "basic launcher", "launch/slurm"],
    "hydra.sweeper._target_=a.B": ["hydra.sweeper", "basic sweeper", "search=NAME"],
    "search=tpe,random": ["search=tpe,random", "add -m"],
    "objective=trial_time_s": ["objective: trial_time_s includes the start of a worker"],
    "workload=parallel space.layers=few": ["space.layers=few: must be an integer or null"],
    "workload=parallel space.imbalance=50%": ["space.imbalance=0.5: must be at least 1"],
    "workload=parallel hardware=h100 gpus=8 plan=true space.tp=3 space.steps=3": [
        "space.tp=3 space.steps=3: no point is valid: dp_replicate, dp_shard, tp, cp, pp do not multiply to 8 ranks",
        "ranks. Points are valid with space.tp=1,2,4,8\n",
    ],
    "workload=parallel model=llama3_70b hardware=h100 gpus=8 plan=true space.tp=8 space.cp=1": [
        "no point fits; the smallest (tp 8, micro-batch 1 x 64, full checkpointing) needs",
        ". Points are valid with space.state=bf16\n",
    ],
    "workload=parallel hardware=h100 gpus=8 plan=true space.ep=2 space.cp=1": ["Points are valid with space.ep=1\n"],
    "workload=parallel hardware=h100 gpus=8 plan=true space.tp=3 space.steps=3 space.pp=5": [
        "sweeper: space.tp=3: no point is valid: dp_replicate, dp_shard, tp, cp, pp do not multiply to 8 ranks\n",
        "\nspace.pp=5: no point is valid: ",
    ],
    "space.q=3 space.m=abc": ["sweeper: space.m=abc: must be an integer or null\nspace.q: unknown parameter."],
    "tracking.uri=foo": ["tracking.uri=foo", "http://host:port"],
    "tracking.uri=https://user:secret@host.invalid": ["https://user:***@host.invalid", "nothing responds"],
    "tracking.uri=postgresql://user:secret@127.0.0.1:9/db": ["user:***@127.0.0.1:9", "nothing responds"],
    "tracking.uri=sqlite:////no/such/folder/x.db": ["tracking.uri=sqlite:", "cannot be written"],
    "tracking.uri=http://user:secret@127.0.0.1:9": ["http://user:***@127.0.0.1:9", "nothing responds"],
    "cluster.address=127.0.0.1:9": ["cluster.address=127.0.0.1:9", "no Ray cluster responds"],
    "dir=/proc/nowhere": ["dir=/proc/nowhere", "cannot be written"],
    "budget": ["budget: neither key=value", "nor a subcommand"],
    "search=[tpe,gp]": ["search=[tpe,gp]", "one name"],
    "workload=offload": ["workload=offload", "these presets run: llama1b, llama70b"],
    "workload=null": ["workload=null", "group=choice"],
    "~budget.tme_s": ["budget.tme_s", "Did you mean budget.time_s?"],
    "budget={trails:5}": ["budget.trails", "Did you mean budget.trials?"],
    "workload=torchtitan hardware=cpu": ["space.assets: required"],
    "workload=command command.directory=false": ["command.directory=false", "must be a string"],
    "workload.objective=step_time_ms": ["the direction of step_time_ms is minimize", "objective=step_time_ms"],
    "workload.direction=min": ["workload.direction=min", "Did you mean minimize?"],
    "space.dtype=float32": ["space.dtype=float32", "Did you mean fp32?"],
    "tracking.uri=": ["tracking.uri=", "not be empty"],
    "--cfg job seed=1,2": ["seed=1,2", "several values", "--cfg"],
    "-cd nothere": ["nothere", "no such folder"],
    "hardware.architecture=-0.0": ["hardware.architecture=-0.0", "sm90, gfx942 or cpu"],
    "-m topology.network_gb_s=tag(log,range(-inf,7))": ["range(-inf,7)", "at most 1,000 in all"],
    "-m seed=range(0,100) budget.trials=range(1,100)": ["budget.trials=range(1,100)", "at most 1,000 in all"],
    "--hydra-help hardware=0x10": ["hardware=0x10", "unknown hardware"],
}
# These take the same ways through the program as others above.
ALSO_WRONG = {
    "budget.trials=2.5": ["budget.trials=2.5", "an integer"],
    "budget.time_s=0": ["budget.time_s=0", "at least"],
    "trial.timeout_s=-1": ["trial.timeout_s=-1", "at least"],
    "seed=-1": ["seed=-1", "at least 0"],
    "space.m=range(nan,5)": ["space.m=range(nan,5)", "between -2^63 and 2^63"],
    "space.m=range(1,4,0.5)": ["space.m=3.5", "an integer"],
    "spce.m=5": ["spce.m", "Did you mean space.m?"],
    "finals.rounds=1": ["finals.rounds=1", "at least 2"],
    "budget.same_failures=0": ["budget.same_failures=0", "at least 1"],
    "space.m=range(1,inf)": ["space.m=range(1,inf)", "between -2^63 and 2^63"],
    "search=baysian": ["search=baysian", "Did you mean tpe?"],
    "precision=fp8": ["precision: unknown key", "Did you mean space.dtype?", "`sweeper plan` has it"],
    "space.m=1024\t2048": ["an integer or null. Separate values by commas: space.m=1024,2048"],
    "limits.tflops=0": ["limits.tflops=0: every trial keeps tflops ≥ 0", "above 0"],
    "limits.step_time_ms=-1": ["no trial keeps step_time_ms ≤ -1"],
    "limits.mfu=40": ["limits.mfu=40", "fraction. Write 0.4"],
    "+budget.trials=5": ["+budget.trials", "without the +"],
    "objective=[tflops,m]": ["m has no direction", "Available: ", "step_time_ms"],
    "objective=[tflops,mfu,hfu,step_time_ms]": ["one to 3 metrics"],
    "objective=[tflops,tflops]": ["objective=[tflops,tflops]", "names tflops twice"],
    "limits.tflops=many": ["limits.tflops=many", "must be a number"],
    "objective=[tflops,step_time_ms] search.pruner=median": ["search.pruner=median", "compares one objective"],
    "metrics.loss=maximize": ["metrics.loss=maximize", "its direction is minimize"],
    "metrics.val_loss=min": ["metrics.val_loss=min", "Did you mean minimize?"],
    "workload=a/b": ["workload=a/b", "unknown workload 'a/b'"],
    "-m workload=matmul,prob": ["workload=prob", "Did you mean probe?"],
    "~trial.retries": ["trial.retries", "required (an integer)"],
    "~seed=5": ["~seed=5", "its value is 0"],
    "++workload=probe": ["++workload=probe", "without ++"],
    "hydra.foo=1": ["hydra.foo", "unknown key"],
    "budget.trials=": ["budget.trials=", "an integer"],
    "gpus=-1": ["gpus=-1", "at least 1"],
    "seed=99999999999": ["seed=99999999999", "at most 4294967295"],
    "price_per_hour=2usd": ["price_per_hour=2usd", "a number"],
    "SEED=5": ["SEED", "Did you mean seed?"],
    "+workload=probe": ["workload", "chosen twice"],
}


@pytest.mark.parametrize(
    ("architecture", "parts"),
    [
        ("cpu", ["space.dtype=bf16 is emulated on this device", "cpu lacks bf16"]),
        ("cpu bf16 fp16", ["space.model=llama3_70b", "394.2 GiB", "without a GPU this machine has 64.0 GiB"]),
    ],
)
def test_a_processor_refuses_formats_that_it_lacks_before_models_that_do_not_fit(
    architecture: str, parts: list[str], run_cli: Callable[..., CommandResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever this machine's processor and memory are."""
    monkeypatch.setattr(host, "cpu_architecture", lambda: architecture)
    monkeypatch.setattr(host, "memory_bytes", lambda: 64 * 2**30)
    result = run_cli(*["workload=llama8b", "space.model=llama3_70b", "hardware=cpu"])
    assert result.code == 2 and all(part in result.err for part in parts), result.err


@pytest.mark.parametrize("arguments", [*WRONG, *(pytest.param(name, marks=pytest.mark.soak) for name in ALSO_WRONG)])
def test_one_message_names_the_key_and_its_allowed_values(
    arguments: str, run_cli: Callable[..., CommandResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[object] = []
    monkeypatch.setattr(cluster, "start", started.append)
    result = run_cli(*arguments.split(" "))
    assert result.code == 2
    assert all(part in result.err for part in (WRONG | ALSO_WRONG)[arguments]), result.err
    assert result.err.startswith("sweeper: ") and len(result.err.strip().splitlines()) <= 2
    assert "Traceback" not in result.err and "secret" not in result.err
    assert result.out == "" and started == []


def test_a_file_that_hides_a_module_is_named(tmp_path: Path) -> None:
    (tmp_path / "yaml.py").write_text("x = 1\n")
    command = [sys.executable, "-m", "sweeper", "list"]
    result = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    message = "sweeper: yaml.py hides the module yaml that sweeper needs. Rename it\n"
    assert (result.returncode, result.stderr) == (2, message)


def test_a_file_that_cannot_be_written_is_named_with_the_code_of_invalid_input(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        exit_with(lambda: Path("/proc/nothing/here").mkdir(), "sweeper accept")  # type: ignore[arg-type, return-value]
    assert ended.value.code == 2
    assert capsys.readouterr().err == "sweeper accept: /proc/nothing/here: No such file or directory\n"


def test_closed_streams_change_nothing_and_narrow_ones_get_every_character(tmp_path: Path) -> None:
    command = f"cd {tmp_path} && {sys.executable} -m sweeper"
    closed = subprocess.run(f"{command} list >&- 2>&- <&-", shell=True, env=environment())
    narrow = environment(PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    refused = subprocess.run(f"{command} list name=\u00e9", shell=True, env=narrow, capture_output=True, text=True)
    assert closed.returncode == 0 and refused.returncode == 2 and "\\xe9" in refused.stderr


def test_a_closed_terminal_stops_a_sweep_unless_nohup_runs_it() -> None:
    previous = signal.getsignal(signal.SIGHUP)
    try:
        for handler in (signal.SIG_DFL, signal.SIG_IGN):
            signal.signal(signal.SIGHUP, handler)
            requests = StopRequests("command")
            requests.install()
            os.kill(os.getpid(), signal.SIGHUP)
            assert requests.requested is (handler == signal.SIG_DFL)
            requests.restore()
    finally:
        signal.signal(signal.SIGHUP, previous)
