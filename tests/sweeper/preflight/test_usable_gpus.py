"""No sweep runs on the CPU of a machine with GPUs unless the user asks for it."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

from sweeper.commands.doctor.checks import check_gpu_setup
from sweeper.config.hardware import Node
from sweeper.config.resolution import CONF, ResolvedConfig, resolve
from sweeper.preflight.devices import describe_problems, select_usable_target
from tests.conftest import CommandResult
from workloads.api import gpu_setup
from workloads.api.errors import UserInputError
from workloads.api.gpu_setup import GpuProblem

TORCH = GpuProblem("there are AMD GPUs, but torch 2.13.0 is built without ROCm", "install a torch")
CPU_NODE = Node("n0", cpus=8, cpu_name="EPYC")


def gpu_node(name: str, *problems: GpuProblem) -> Node:
    return Node(name, cpus=8, cpu_name="EPYC", gpus=8, accelerator="AMD-Instinct-MI300X-OAM", gpu_problems=problems)


@pytest.fixture
def amd_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine with a /dev/kfd and without amdsmi."""
    (tmp_path / "kfd").touch()
    monkeypatch.setattr(gpu_setup, "DEVICES", tmp_path)
    monkeypatch.setattr(gpu_setup, "read_torch_build", lambda: None)
    for name in ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("amd_machine")
def test_a_cpu_is_swept_on_a_machine_with_gpus_only_if_it_is_named(run_cli: Callable[..., CommandResult]) -> None:
    for arguments in (["workload=probe"], ["workload=probe", "plan=true"], ["workload=probe", "hardware=mi300x"]):
        result = run_cli(*arguments)
        assert result.code == 2 and "kfd, but Ray sees no GPU" in result.err
        assert "remedy: pip install /opt/rocm/share/amd_smi" in result.err and len(result.err.splitlines()) == 2
    result = run_cli("workload=probe", "plan=true", "hardware=cpu")
    assert result.code == 0 and "warning" not in result.out


@pytest.mark.usefixtures("amd_machine")
def test_a_plan_for_gpus_says_what_keeps_those_of_this_machine_from_being_used(
    run_cli: Callable[..., CommandResult],
) -> None:
    result = run_cli("workload=probe", "plan=true", "hardware=mi300x")
    assert result.code == 0 and "1 x mi300x, planned" in result.out
    (warning,) = [line for line in result.out.splitlines() if line.startswith("warning")]
    assert "this machine: there is" in warning and "Ray sees no GPU" in warning


def resolved_for(*overrides: str) -> ResolvedConfig:
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF), version_base=None):
        return resolve(compose("config", overrides=list(overrides)))


@pytest.mark.parametrize("hardware", ["auto", "mi300x"])
def test_gpus_that_torch_cannot_use_are_an_error(hardware: str) -> None:
    resolved = resolved_for("workload=matmul", f"hardware={hardware}")
    with pytest.raises(UserInputError, match=rf"^hardware={hardware}: n1: there are AMD GPUs, but torch"):
        select_usable_target(resolved, [CPU_NODE, gpu_node("n1", TORCH)], 1)


@pytest.mark.parametrize(
    "overrides",
    [
        ("workload=matmul", "plan=true"),
        ("workload=primus", "space.experiment=x"),  # Primus runs in an environment of its own
    ],
)
def test_a_plan_and_a_command_for_named_gpus_do_without_torch_here(overrides: tuple[str, ...]) -> None:
    resolved = resolved_for("hardware=mi300x", *overrides)
    assert select_usable_target(resolved, [gpu_node("n1", TORCH)], 1).devices == 8


def test_a_sweep_uses_the_nodes_that_can_use_their_gpus() -> None:
    nodes = [gpu_node("n1", TORCH), gpu_node("n2")]
    target = select_usable_target(resolved_for("workload=matmul"), nodes, 1)
    assert [node.address for node in target.nodes] == ["n2"]
    assert len(target.with_nodes([gpu_node("n3"), gpu_node("n4", TORCH)]).nodes) == 2  # nodes that join
    with pytest.raises(UserInputError, match=r"^gpus=16: the cluster has 8 GPUs .*\nn1: there are AMD GPUs"):
        select_usable_target(resolved_for("workload=probe", "gpus=16"), nodes, 16)
    assert [finding.location for finding in check_gpu_setup(nodes)] == ["n1"]


def test_a_problem_of_several_nodes_is_one_line() -> None:
    nodes = [gpu_node(f"n{number}", TORCH) for number in range(1, 6)]
    (line,) = describe_problems(nodes)
    assert line.startswith("n1, n2, n3 and 2 more: there are AMD GPUs") and line.endswith("; remedy: install a torch")
