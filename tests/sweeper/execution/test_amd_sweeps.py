"""Sweeps and plans on AMD GPUs, which real Ray finds through the stand-in `amdsmi`."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import PYTHONPATH, CommandResult, Workspace
from tests.support.amd import stand_in_environment, use_stand_in
from tests.support.amd_head import TokenCluster
from tests.support.ray_cluster import Cluster
from workloads.api import gpu_setup

SWEEP = ["hardware=mi300x", "search=random", "finals.top=0", "progress=never"]
# Appends the variables that choose GPUs to a file, and waits until as many programs have done so as run at once.
PROGRAM = """
import json, os, sys, time
from pathlib import Path
file, at_once = Path(sys.argv[1]), int(sys.argv[2])
chosen = {name.partition("_")[0]: value for name, value in os.environ.items() if name.endswith("_VISIBLE_DEVICES")}
with file.open("a") as lines:
    lines.write(json.dumps(chosen, sort_keys=True) + chr(10))
deadline_s = time.monotonic() + 60
while len(set(file.read_text().splitlines())) < at_once and time.monotonic() < deadline_s:
    time.sleep(0.05)
print("step_time_ms: 10", flush=True)
"""
COMMAND = ["workload=gpus", "--config-dir", "."]
WORKLOAD = """# @package _global_
workload: {{name: command, objective: step_time_ms, direction: minimize}}
command:
  start: {start}
  run: [{python}, -c, {program}, "{{ledger}}", "{{at_once}}", "{{x}}"]
  log: {{step_time_ms: 'step_time_ms: (\\d+)'}}
  steps: 1
  warmup: 0
space: {{ledger: {ledger}, at_once: {at_once}, x: "range(1, 100)"}}
"""


def run_command(workspace: Workspace, cluster: TokenCluster, start: str, gpus: int, gangs: int) -> list[dict[str, str]]:
    """Run a sweep whose gangs all run at once. Returns the variables that choose GPUs, as the programs have them."""
    folder, ledger = workspace.path / "workload", workspace.path / "ledger"
    folder.mkdir()
    fields = {"python": sys.executable, "program": json.dumps(PROGRAM), "start": start, "ledger": str(ledger)}
    (folder / "gpus.yaml").write_text(WORKLOAD.format(**fields, at_once=gangs))
    # A gang takes two trials: with twice as many as gangs, each gang has one to run.
    arguments = [f"gpus={gpus}", f"budget.trials={2 * gangs}", f"cluster.max_concurrent_trials={gangs}"]
    result = workspace.run(*COMMAND, *SWEEP, *arguments, **cluster.variables)
    assert result.code == 0 and "8 x AMD Instinct MI300X" in result.err, result.out + result.err
    return [json.loads(line) for line in sorted(set(ledger.read_text().splitlines()))]


@pytest.mark.long(22)
@pytest.mark.xdist_group("amd_cluster")
@pytest.mark.parametrize("workers", [2, pytest.param(8, marks=pytest.mark.soak)])
def test_each_worker_has_a_gpu_of_its_own(workspace: Workspace, amd_cluster: TokenCluster, workers: int) -> None:
    """A site's CUDA_VISIBLE_DEVICES names all GPUs of the node; a worker and its program have their own alone."""
    chosen = run_command(workspace, amd_cluster, "gpu", gpus=1, gangs=workers)
    numbers = [program["CUDA"] for program in chosen]
    assert len(set(numbers)) == workers and set(numbers) <= set("01234567")
    assert chosen == [{"CUDA": number, "HIP": number} for number in numbers]


@pytest.mark.soak
@pytest.mark.xdist_group("amd_cluster")
def test_two_gangs_of_four_share_no_gpu(workspace: Workspace, amd_cluster: TokenCluster) -> None:
    chosen = run_command(workspace, amd_cluster, "node", gpus=4, gangs=2)
    assert [(program["HIP"], program["CUDA"]) for program in chosen] == 2 * [("0,1,2,3", "0,1,2,3")]
    gpus = [number for program in chosen for number in program["ROCR"].split(",")]
    assert sorted(gpus) == [str(number) for number in range(8)]


@pytest.mark.soak
def test_a_sweep_of_this_machine_uses_every_gpu_even_with_fewer_cores(workspace: Workspace) -> None:
    arguments = ["workload=probe", *SWEEP, "budget.trials=16", "space.sleep_s=6"]
    result = workspace.run(*arguments, **stand_in_environment())
    assert result.code == 0 and "8 x AMD Instinct MI300X; 8 trials at once" in result.err, result.err
    where = [trial.user_attrs["record"]["where"] for trial in workspace.trials()]
    assert {place["gpus"] for place in where} == {str(number) for number in range(8)}
    assert len({place["pid"] for place in where}) == 8


# ── plans ──


@pytest.fixture
def scenario(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., None]]:
    """Choose the stand-in's scenario for Ray's detection in this process, which is made once and then kept."""
    from ray._private import accelerators
    from ray._private.thirdparty import pyamdsmi

    detection = accelerators.get_accelerator_manager_for_resource
    kept = detection.__dict__.pop("_resource_name_to_accelerator_manager", None)
    for name in ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(gpu_setup, "DEVICES", tmp_path / "dev")

    def choose(name: str) -> None:
        use_stand_in(monkeypatch, name)
        import amdsmi

        module = pyamdsmi.pyamdsmi
        for attribute in ("AmdSmiInitFlags", "AmdSmiMemoryType", "AmdSmiLibraryException"):
            monkeypatch.setattr(module, attribute, getattr(amdsmi, attribute))
        monkeypatch.setattr(module, "amdsmi", amdsmi)
        monkeypatch.setattr(module, "_AMDSMI_AVAILABLE", True)

    yield choose
    detection.__dict__.pop("_resource_name_to_accelerator_manager", None)
    if kept is not None:
        detection.__dict__["_resource_name_to_accelerator_manager"] = kept


@pytest.mark.parametrize(
    ("arguments", "devices"),
    [
        (["workload=llama8b", "hardware=mi300x"], "8 x AMD Instinct MI300X; 1 trial at once"),
        (
            ["workload=parallel", "hardware=mi300x", "gpus=8"],
            "8 x AMD Instinct MI300X; 1 trial at once, each on 8 GPUs",
        ),
        (["workload=probe"], "8 x AMD Instinct MI300X; 8 trials at once"),
    ],
    ids=["offloading", "parallel", "auto"],
)
def test_a_plan_uses_the_eight_gpus_of_this_machine(
    arguments: list[str], devices: str, scenario: Callable[..., None], run_cli: Callable[..., CommandResult]
) -> None:
    scenario("mi300x")
    result = run_cli(*arguments, "plan=true")
    assert result.code == 0 and f"device   {devices}" in result.out, result.err


@pytest.mark.parametrize(
    ("name", "devices"),
    [("mi300x_cpx_nps4", "64 x AMD Instinct MI300X"), ("raising", "8 x gpu"), ("mi300x_virtual", "8 x AMD Instinct")],
)
def test_partitions_and_gpus_that_report_little_are_planned_as_gpus(
    name: str, devices: str, scenario: Callable[..., None], run_cli: Callable[..., CommandResult]
) -> None:
    scenario(name)
    result = run_cli("workload=probe", "plan=true")
    assert result.code == 0 and f"device   {devices}" in result.out, result.err


@pytest.mark.parametrize("name", ["no_gpus", "no_driver"])
def test_without_gpus_in_amdsmi_a_cpu_is_planned_only_if_there_is_no_device_file(
    name: str, scenario: Callable[..., None], run_cli: Callable[..., CommandResult], tmp_path: Path
) -> None:
    scenario(name)
    assert run_cli("workload=probe", "plan=true").code == 0
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "kfd").touch()
    result = run_cli("workload=probe", "plan=true")
    assert result.code == 2 and "see what `amd-smi list` lists" in result.err


@pytest.mark.soak
def test_the_installed_commands_plan_with_the_stand_in(workspace: Workspace) -> None:
    for arguments in (["workload=llama8b"], ["workload=parallel", "gpus=8"]):
        result = workspace.run(*arguments, "hardware=mi300x", "plan=true", **stand_in_environment())
        assert result.code == 0 and "8 x AMD Instinct MI300X" in result.out, result.err


@pytest.mark.soak
@pytest.mark.parametrize("cluster", [1], indirect=True)
def test_a_plan_names_the_node_of_a_cluster_whose_gpus_torch_cannot_use(
    workspace: Workspace, cluster: Cluster, tmp_path: Path
) -> None:
    """Two nodes have the same GPUs; the second one has a /dev/kfd, and its torch is not built for ROCm."""
    (tmp_path / "site" / "torch").mkdir(parents=True)
    (tmp_path / "site" / "torch" / "__init__.py").touch()
    (tmp_path / "site" / "torch" / "version.py").write_text("__version__ = '2.13.0'\ncuda = '13.0'\nhip = None\n")
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "kfd").touch()
    setup = f"from pathlib import Path; from workloads.api import gpu_setup; gpu_setup.DEVICES = Path('{tmp_path}/dev')"
    (tmp_path / "site" / "sitecustomize.py").write_text(setup)
    cluster.add(PYTHONPATH=f"{tmp_path}/site:{PYTHONPATH}")
    arguments = ["workload=probe", f"cluster.address={cluster.address}", "cluster.insecure=true", "plan=true"]
    result = workspace.run(*arguments, "hardware=auto")
    assert result.code == 0 and "device   2 x H200" in result.out, result.out + result.err
    (warning,) = [line for line in result.out.splitlines() if line.startswith("warning")]
    assert "): there are AMD GPUs, but torch 2.13.0 is built without ROCm; remedy: " in warning
    result = workspace.run(*arguments, "gpus=4")
    assert result.code == 2 and "gpus=4: the cluster has 2 GPUs" in result.err and "without ROCm" in result.err
