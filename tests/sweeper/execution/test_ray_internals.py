"""One test for each use of what Ray does not document. Its message says what to do where a version has changed it."""

import inspect
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import ray

from sweeper.execution import ray_internals
from sweeper.execution.ray_internals import without_unused_processes
from tests.conftest import environment
from tests.support import canaries

canary = partial(canaries.canary, "ray")
BINARIES = Path(ray.__file__).parent


def test_ray_counts_and_names_this_machines_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    with canary(
        "its accelerator managers (ray._private.accelerators)",
        "A plan and `ray.init` must count the same GPUs: adapt part 1 of ray_internals.py to what `ray.init` calls in"
        " ray/_private/resource_and_label_spec.py.",
    ):
        monkeypatch.setenv(ray_internals.visible_gpus_variable(), "3,0")
        assert ray_internals.visible_gpu_ids() == ["3", "0"]
        monkeypatch.delenv(ray_internals.visible_gpus_variable())
        assert ray_internals.visible_gpu_ids() is None
        assert bool(ray_internals.gpu_type()) <= bool(ray_internals.count_gpus())


@pytest.mark.gpu
def test_ray_labels_a_node_with_the_type_of_its_gpus() -> None:
    """Many nodes are selected by this label (gang_launcher.py), which Ray gives a node where it finds GPUs."""
    program = "import ray; from sweeper.execution.cluster import init_ray; init_ray(address='local');"
    program += "print(*(entry['Labels'].get('ray.io/accelerator-type') for entry in ray.nodes()))"
    command = [sys.executable, "-c", program]
    run = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120)
    assert run.stdout.split() == [ray_internals.gpu_type()], run.stderr


def test_ray_starts_the_processes_that_a_sweep_leaves_out_by_methods_of_their_own() -> None:
    with canary(
        "how it starts a local cluster (ray._private.node.Node, ray._private.services.start_ray_process)",
        "Find the methods that start the autoscaler, the log monitor and the dashboard's server in"
        " ray/_private/node.py, and name them in part 2 of ray_internals.py. An empty UNUSED is correct too: a sweep"
        " then starts 1 s later and ends 1 s later.",
    ):
        before = [vars(ray_internals.RAY_NODE)[name] for name in ray_internals.UNUSED]
        start_process = getattr(*ray_internals.START_PROCESS)
        assert list(inspect.signature(start_process).parameters)[:2] == ["command", "process_type"]
        with without_unused_processes():
            during = [vars(ray_internals.RAY_NODE)[name] for name in ray_internals.UNUSED]
            assert not {*during} & {*before} and getattr(*ray_internals.START_PROCESS) is not start_process
        assert [vars(ray_internals.RAY_NODE)[name] for name in ray_internals.UNUSED] == before
        assert getattr(*ray_internals.START_PROCESS) is start_process


def give_environment(runtime_env: dict[str, object] | None) -> dict[str, object]:
    return {**(runtime_env or {}), "env_vars": {"A": "1"}}


def test_it_is_known_whether_ray_gives_all_workers_an_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with canary(
        "what decides on the environment of all workers (ray._private.worker._maybe_modify_runtime_env)",
        "Find in ray/_private/worker.py what `ray.init` does to `runtime_env`, for `gives_workers_an_environment`.",
    ):
        assert not ray_internals.gives_workers_an_environment()
        monkeypatch.setenv("RAY_RUNTIME_ENV_HOOK", f"{__name__}.give_environment")
        assert ray_internals.gives_workers_an_environment()


def test_the_raylet_knows_the_options_and_the_messages() -> None:
    binary = (BINARIES / "core/src/ray/raylet/raylet").read_bytes()
    for option in ray_internals.NO_AGENT + ray_internals.NO_RUNTIME_ENVIRONMENT_AGENT:
        name = option.partition("=")[0].strip("-").replace("-", "_")
        with canary(
            f"the raylet's option {name}",
            "Find the options for the dashboard's agent in ray/_private/services.py (start_raylet), and put them into"
            " NO_AGENT in ray_internals.py. Without any, a sweep needs 2 s more of CPU time.",
        ):
            assert name.encode() in binary
    for message in (ray_internals.CRASHED.rstrip(" 2"), ray_internals.EXIT_DETAIL, ray_internals.LOW_MEMORY):
        with canary(
            f"its message with {message!r}",
            "Kill a worker of a sweep and let one leak memory (tests/sweeper/execution/test_lost_nodes.py, -m soak),"
            " and put the new words into part 5 of ray_internals.py.",
        ):
            assert message.encode() in binary


def test_ray_reads_its_undocumented_settings() -> None:
    with canary(
        "the settings that init_ray puts into the environment",
        "Look for the setting's successor in ray_config_def.h and ray/_private/accelerators/accelerator.py, or remove"
        " it from SETTINGS in ray_internals.py if its value is the default now.",
    ):
        from ray._private.accelerators.accelerator import RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO_ENV_VAR as OVERRIDE

        binary = (BINARIES / "_raylet.so").read_bytes()
        assert all(name == OVERRIDE or name.encode() in binary for name in ray_internals.SETTINGS)


def test_the_program_that_probes_a_cluster_runs() -> None:
    """Whether it is refused without the token is tested in test_cluster_token.py."""
    with canary(
        "its client of the control store (ray._raylet.GcsClient)",
        "PROBE in ray_internals.py has to end with an error on a cluster that refuses it, and without one on a cluster"
        " that does not: see what `ray.init` does with the address in ray/_private/worker.py.",
    ):
        *imports, call = ray_internals.PROBE.strip().splitlines()
        names: dict[str, object] = {}
        exec("\n".join(imports), names)
        canonicalize = names["canonicalize_bootstrap_address"]
        assert call == "GcsClient(address=canonicalize_bootstrap_address(sys.argv[1]))" and callable(canonicalize)
        assert canonicalize("192.0.2.1:6379") == "192.0.2.1:6379" and callable(names["GcsClient"])


def test_ray_tells_the_address_of_a_running_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """tests/cluster/test_silent_head.py finds one by its process; here by the variable, which Ray reads first."""
    with canary(
        "how it finds a running cluster (ray._private.services.canonicalize_bootstrap_address)",
        "Adapt part 6 of ray_internals.py to what `ray.init(address='auto')` calls in ray/_private/worker.py. Without"
        " it a cluster that does not answer is refused after a minute.",
    ):
        monkeypatch.setenv("RAY_ADDRESS", "10.1.2.3:6379")
        assert ray_internals.find_running_cluster() == "10.1.2.3:6379"
