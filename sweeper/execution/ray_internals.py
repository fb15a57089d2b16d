"""Every use of undocumented parts of Ray: the only module that imports from `ray._private`.

Ray is pinned to the minor versions in which these uses were tried (pyproject.toml).
`tests/sweeper/execution/test_ray_internals.py` has a test for each of them, whose message has the remedy for a version
that breaks it. A new use comes with its test.
"""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ray._private import services
from ray._private.accelerators import get_accelerator_manager_for_resource
from ray._private.node import Node
from ray._private.runtime_env.constants import RAY_JOB_CONFIG_JSON_ENV_VAR
from ray._private.worker import _maybe_modify_runtime_env as modify_runtime_env

# 1. The GPUs of this machine as Ray counts them. `ray.init` counts with the same code, and no public function says
#    what it would count before it has started.


def visible_gpu_ids() -> list[str] | None:
    """Return the GPUs that the environment of this process lists; None if it lists none."""
    return get_accelerator_manager_for_resource("GPU").get_current_process_visible_accelerator_ids()


def count_gpus() -> int:
    """Return how many GPUs Ray detects on this machine, whatever the environment variables are."""
    return int(get_accelerator_manager_for_resource("GPU").get_current_node_num_accelerators())


def gpu_type() -> str | None:
    """Return Ray's name for the GPUs of this machine: its label `ray.io/accelerator-type`."""
    return get_accelerator_manager_for_resource("GPU").get_current_node_accelerator_type()


def visible_gpus_variable() -> str:
    """Return the environment variable that chooses GPUs here, such as CUDA_VISIBLE_DEVICES."""
    return str(get_accelerator_manager_for_resource("GPU").get_visible_accelerator_ids_env_var())


# 2. The processes of a local Ray that a sweep does not use, against which `ray.init` has no option: an autoscaler, a
#    monitor that copies workers' logs to the driver, and the dashboard's server, which without a dashboard has no
#    pages. Without them, measured on two idle cores, `ray.init` takes 2.4 s instead of 3.4 s and `ray.shutdown` 0.2 s
#    instead of 1.2 s.
#
#    The raylet also starts the dashboard's agent, a Python program, and waits for its ports; after 15 s without them it
#    ends, and the sweep with it. Without `ray[default]` the agent imports Ray to report that it has none
#    (ray/dashboard/agent.py). Two trials of nothing take 10.3 to 12.9 s of CPU time without it, 12.6 to 14.8 s with it,
#    on two busy cores.
#
#    Methods of Ray's class for a node, each of which starts one process; and the function that starts the raylet.
RAY_NODE = Node
UNUSED = ("start_monitor", "start_log_monitor", "start_api_server")
START_PROCESS = (services, "start_ray_process")
# The raylet's options that replace the dashboard's agent, for which it would wait. A raylet exits on an unknown option.
# The command must not be empty, and the raylet ends with it: `cat` runs until the raylet's end closes its input.
NO_AGENT = (
    "--metrics-agent-port=-1",
    "--metrics_export_port=-1",
    "--dashboard_agent_listen_port=-1",
    "--dashboard_agent_command=cat",
)
# The same of the agent that prepares runtime environments: another Python program, which takes 0.9 s of CPU time and
# which Ray asks only for workers with an environment of their own.
NO_RUNTIME_ENVIRONMENT_AGENT = ("--runtime_env_agent_port=1", "--runtime_env_agent_command=cat")


def gives_workers_an_environment() -> bool:
    """Return whether `ray.init` gives all workers an environment: under `uv run`, with a hook, or in a Ray job."""
    return RAY_JOB_CONFIG_JSON_ENV_VAR in os.environ or bool(modify_runtime_env(None, False))


@contextmanager
def without_unused_processes(*, runtime_environments: bool = True) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Let `ray.init` start a local cluster without them, and with what prepares `runtime_environments` or not.

    Yields the processes that it has started. If it fails, they run on.
    """
    started: list[subprocess.Popen[bytes]] = []
    no_agents = NO_AGENT if runtime_environments else NO_AGENT + NO_RUNTIME_ENVIRONMENT_AGENT
    start_process = getattr(*START_PROCESS)

    def without_agent(command: list[str], process_type: str, *args: Any, **kwargs: Any) -> Any:
        options = no_agents if process_type == "raylet" else ()  # the last of equal options counts
        info = start_process([*command, *options], process_type, *args, **kwargs)
        started.append(info.process)
        return info

    replaced: dict[tuple[Any, str], Any] = {(RAY_NODE, name): lambda *_, **__: None for name in UNUSED}
    replaced[START_PROCESS] = without_agent
    originals = {place: getattr(*place) for place in replaced}
    for place, replacement in replaced.items():
        setattr(*place, replacement)
    try:
        yield started
    finally:
        for place, original in originals.items():
            setattr(*place, original)


# 3. A program that connects to the control store of the cluster whose address is its argument, and fails if it is
#    refused. Ray's own client: `ray.init` tries for 20 s before it reports that it was refused (measured: 24 s against
#    4 s on a busy machine), and it needs a node of the cluster on this machine.
PROBE = """
import sys
from ray._private.services import canonicalize_bootstrap_address
from ray._raylet import GcsClient
GcsClient(address=canonicalize_bootstrap_address(sys.argv[1]))
"""

# 4. Settings that Ray reads from the environment and does not list in its documentation.
SETTINGS = {
    # By default Ray starts a Python process for each core in advance; a sweep needs only a few.
    "RAY_prestart_worker_first_driver": "0",
    # The coming default; without it Ray warns.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}

# 5. Parts of Ray's messages. The classes of its exceptions do not distinguish these cases.
CRASHED = "connection error code 2"  # a worker's end, of which its node knows nothing more
EXIT_DETAIL = "exit detail: "
SLOW_START = "timed out"  # `ray.init` waits 30 s for its processes, of which no setting is known (ray/_private/node.py)
LOW_MEMORY = "running low on memory"  # Ray ended a worker; an actor's death is not an OutOfMemoryError

# 6. The address of the cluster that runs on this machine, which `ray.init(address="auto")` joins. Ray tries for a
#    minute where it does not respond; with an address a sweep tries for 5 s.


def find_running_cluster() -> str:
    """Return host:port of the cluster that `auto` means. Raises ConnectionError if no cluster runs here."""
    return str(services.canonicalize_bootstrap_address("auto"))
