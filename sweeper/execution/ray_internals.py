"""All uses of undocumented parts of Ray. No other module imports from `ray._private`.

pyproject.toml pins Ray to the minor versions that were tested with this module. Each use has a test in
`tests/sweeper/execution/test_ray_internals.py`. If a new Ray version breaks one of these uses, its test fails with a
message that gives the remedy. A new use needs a new test.
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

from workloads.tables import read_toml

# 1. The number of GPUs that Ray detects on this machine. `ray.init` counts GPUs with the same code, and no public
#    function returns the number before `ray.init` is called.


def visible_gpu_ids() -> list[str] | None:
    """Return the GPUs listed in this process's environment variables, or None if the variables are not set."""
    return get_accelerator_manager_for_resource("GPU").get_current_process_visible_accelerator_ids()


def count_gpus() -> int:
    """Return how many GPUs Ray detects on this machine, ignoring environment variables."""
    return int(get_accelerator_manager_for_resource("GPU").get_current_node_num_accelerators())


def gpu_type() -> str | None:
    """Return Ray's name for this machine's GPUs, which is the value of the label `ray.io/accelerator-type`."""
    return get_accelerator_manager_for_resource("GPU").get_current_node_accelerator_type()


def visible_gpus_variable() -> str:
    """Return the name of the variable that selects GPUs on this machine, such as CUDA_VISIBLE_DEVICES."""
    return str(get_accelerator_manager_for_resource("GPU").get_visible_accelerator_ids_env_var())


# 2. The processes of a local Ray cluster that a sweep does not use and that no option of `ray.init` disables: the
#    autoscaler, the monitor that copies workers' logs to the driver, and the dashboard's server, which serves no pages
#    if the dashboard is off. Without these processes, `ray.init` takes 2.4 s instead of 3.4 s and `ray.shutdown` 0.2 s
#    instead of 1.2 s, measured on two idle cores.
#
#    The raylet also starts the dashboard agent, a Python program, and waits for its ports. If the ports do not open
#    within 15 s, the raylet and the sweep end. Without `ray[default]`, the agent imports Ray only to report
#    that it has no ports (ray/dashboard/agent.py). On two busy cores, two empty trials take 10.3 to 12.9 s of CPU time
#    without the agent and 12.6 to 14.8 s with it.
#
#    Replaced below: methods of Ray's node class that each start one process, and the function that starts the raylet.
RAY_NODE = Node
UNUSED = ("start_monitor", "start_log_monitor", "start_api_server")
START_PROCESS = (services, "start_ray_process")
# Raylet options that replace the dashboard agent, so the raylet does not wait for it. A raylet exits on an unknown
# option. Its agent command must not be empty, and the raylet exits if the command does. `cat` runs as long as needed.
NO_AGENT = (
    "--metrics-agent-port=-1",
    "--metrics_export_port=-1",
    "--dashboard_agent_listen_port=-1",
    "--dashboard_agent_command=cat",
)
# The same for the runtime environment agent, another Python program. It takes 0.9 s of CPU time, and Ray needs it only
# for workers with their own environment.
NO_RUNTIME_ENVIRONMENT_AGENT = ("--runtime_env_agent_port=1", "--runtime_env_agent_command=cat")


def gives_workers_an_environment() -> bool:
    """Return whether `ray.init` sets an environment for all workers, as under `uv run`, with a hook or in a Ray job."""
    return RAY_JOB_CONFIG_JSON_ENV_VAR in os.environ or bool(modify_runtime_env(None, False))


@contextmanager
def without_unused_processes(*, runtime_environments: bool = True) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Make `ray.init` start no unused processes.

    If `runtime_environments` is true, the agent for runtime environments is kept. Yields the list of started processes,
    which keep running if `ray.init` fails."""
    started: list[subprocess.Popen[bytes]] = []
    no_agents = NO_AGENT if runtime_environments else NO_AGENT + NO_RUNTIME_ENVIRONMENT_AGENT
    start_process = getattr(*START_PROCESS)

    def without_agent(command: list[str], process_type: str, *args: Any, **kwargs: Any) -> Any:
        options = no_agents if process_type == "raylet" else ()  # if an option is repeated, the last value applies
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


# 3. A program that connects to a cluster's control store at the address in its argument, and fails if the store refuses
#    the connection. It uses Ray's own client because `ray.init` needs a node of the cluster on this machine and retries
#    for 20 s before it reports the refusal (24 s in total instead of 4 s, measured on a busy machine).
PROBE = """
import sys
from ray._private.services import canonicalize_bootstrap_address
from ray._raylet import GcsClient
GcsClient(address=canonicalize_bootstrap_address(sys.argv[1]))
"""

# 4. Settings that Ray reads from the environment but does not document.
SETTINGS: dict[str, str] = read_toml(__file__, "ray_settings.toml")

# 5. Parts of Ray's messages, because Ray's exception classes do not distinguish these cases.
CRASHED = "connection error code 2"  # a worker ended for a reason unknown to its node
EXIT_DETAIL = "exit detail: "
SLOW_START = "timed out"  # `ray.init` waits 30 s for its processes; no setting is known (ray/_private/node.py)
LOW_MEMORY = "running low on memory"  # Ray ended a worker; for actors it raises no OutOfMemoryError

# 6. The address of the cluster on this machine that `ray.init(address="auto")` joins. If the cluster does not respond,
#    Ray retries for a minute with `auto`, but a sweep that has the address gives up after 5 s.


def find_running_cluster() -> str:
    """Return HOST:PORT of the cluster that `auto` refers to. Raises ConnectionError if this machine runs none."""
    return str(services.canonicalize_bootstrap_address("auto"))
