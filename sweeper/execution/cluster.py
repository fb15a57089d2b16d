"""Connect to a Ray cluster or start one, and discover its nodes."""

import contextlib
import logging
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from sweeper.config.catalogue import catalogue
from sweeper.config.hardware import Node, Target
from sweeper.config.schema import Hardware
from sweeper.execution import code_probe, head, ray_internals
from sweeper.execution.node_description import build_node, count_gpus, describe_local_node
from sweeper.execution.ray_environment import find_address, name_address, provide_token
from sweeper.execution.shipping import PARTS, SweepCode, build_runtime_env
from sweeper.preflight.devices import select_target
from workloads.api.errors import UserInputError
from workloads.api.notices import notify
from workloads.api.processes import Orphans
from workloads.api.validation import check_known

NODE_REPLY_TIMEOUT_S = 60.0


class ClusterError(Exception):
    """Raised when the cluster cannot run trials. The message gives the cause, and finished trials are kept."""


def discover_nodes(
    address: str | None, insecure: bool = False, variables: Collection[str] = (), code: SweepCode | None = None
) -> list[Node]:
    """Connect to the cluster at `address` and return its nodes. Without an address, return this machine.

    This function never starts a cluster, and reads only `variables` from the nodes' environments. `code` is what the
    sweep needs on the nodes in addition to our packages. If any node lacks a part, Ray sends that part to all nodes.

    Raises UserInputError if no cluster responds or, unless `insecure`, if it accepts unauthenticated connections.
    """
    stop()  # an earlier sweep in this process may have left a connection open
    if not insecure and (mode := os.environ.get("RAY_AUTH_MODE", "token")).lower() != "token":
        remedy = "set RAY_AUTH_MODE=token or cluster.insecure=true"
        raise UserInputError(f"RAY_AUTH_MODE={mode}: Ray listens on every interface and needs a token; {remedy}")
    named, is_given = name_address(address), bool(address)
    address = find_address(address)
    if address is None:
        return [describe_local_node(variables)]
    remedy = "" if is_given else "; to run on this machine, set cluster.address=local or unset RAY_ADDRESS"
    if address.startswith(("http://", "https://")):
        raise UserInputError(f"{named}: is the address of Ray's dashboard; set HOST:PORT of the head{remedy}")
    try:
        if address == "auto":
            address = ray_internals.find_running_cluster()
            named = f"cluster.address={address}"
        if host_port := re.fullmatch(r"(?:ray://)?([^:/]+):(\d+)", address):
            # Check first, because Ray would retry for minutes and print every attempt.
            socket.create_connection((host_port[1], int(host_port[2])), timeout=5).close()
            head.watch(f"{host_port[1]}:{host_port[2]}")
        if not insecure:
            _check_authentication(address, named)
        init_ray(address=address)
    except (OSError, ValueError, RuntimeError) as error:
        cause = "start one with `ray start --head`" if address == "auto" else summarize_ray_error(error)
        raise UserInputError(f"{named}: no Ray cluster responds ({cause}){remedy}") from error
    global _code
    _code = code or SweepCode()
    nodes, missing, problems = _query_nodes(variables)
    if missing:
        _send_code(address, missing)
        nodes, missing, problems = _query_nodes(variables)
    if problems and not nodes:
        raise UserInputError(problems[0])
    for problem in problems:
        notify(f"sweeper: {problem}; the sweep does not use it")
    return nodes


def find_target(hardware: str, address: str | None, insecure: bool) -> tuple[Target, list[Node]]:
    """Return the devices that `hardware=` selects, and all nodes. Raises UserInputError if no device is selected."""
    kinds = {"auto": Hardware("auto"), "cpu": Hardware("cpu", kind="cpu"), **catalogue()}
    check_known(hardware, kinds, f"hardware={hardware}: unknown hardware")
    nodes = discover_nodes(address, insecure)
    return select_target(kinds[hardware], nodes, 1), nodes


_code = SweepCode()  # for the connected cluster


def _query_nodes(variables: Collection[str]) -> tuple[list[Node], dict[str, set[str]], list[str]]:
    nodes: list[Node] = []
    missing: dict[str, set[str]] = {}
    problems: list[str] = []
    entries = [entry for entry in ray.nodes() if entry["Alive"]]
    for entry, reply in [(entry, _request_description(entry, variables)) for entry in entries]:
        address = entry["NodeManagerAddress"]
        try:
            found, description = ray.get(reply, timeout=NODE_REPLY_TIMEOUT_S)
        except RayError as error:  # the node may have just been lost
            problems.append(f"cluster: node {address} does not run tasks ({summarize_ray_error(error)})")
            continue
        if problem := _code.find_version_problem(found):
            problems.append(f"cluster: node {address} {problem}")
        elif parts := _code.find_missing(found):
            missing[address] = missing.get(address, set()) | parts
        else:
            nodes.append(build_node(entry, description))
    return nodes, missing, problems


def _request_description(entry: dict[str, Any], variables: Collection[str] = ()) -> Any:
    """Start `code_probe.probe` on a node, which may lack our code, and return a reference to the result."""
    # If the node is lost, this task fails. Placed by the label ray.io/node-id, it would wait forever.
    on_node = NodeAffinitySchedulingStrategy(node_id=entry["NodeID"], soft=False)
    ray.cloudpickle.register_pickle_by_value(code_probe)
    task = ray.remote(code_probe.probe).options(num_cpus=0, scheduling_strategy=on_node)
    return task.remote(*_code.request, count_gpus(entry), variables)


def _send_code(address: str, missing: Mapping[str, set[str]]) -> None:
    """Reconnect to send the missing code, because Ray accepts folders only when connecting. Raises UserInputError."""
    global _code
    parts = set().union(*missing.values())
    names = " and ".join(name for part, name in PARTS.items() if part in parts)
    notify(f"sweeper: cluster: {', '.join(missing)} lack {names}; Ray sends this machine's")
    _code = replace(_code, sent=frozenset(parts))
    with tempfile.TemporaryDirectory(prefix="sweeper-code-") as scratch:
        runtime_env = build_runtime_env(_code, parts, Path(scratch))
        stop()
        try:
            init_ray(address=address, runtime_env=runtime_env)
        except (OSError, ValueError, RuntimeError) as error:
            cause = summarize_ray_error(error)
            raise UserInputError(f"cluster: Ray cannot send {names} to the nodes: {cause}") from error


def _check_authentication(address: str, named: str) -> None:
    """Raise UserInputError unless the cluster requires a token and accepts ours."""
    if address.startswith("ray://"):
        remedy = "set cluster.address to HOST:PORT of the head, or set cluster.insecure=true"
        raise UserInputError(f"{named}: authentication cannot be checked through ray://; {remedy}")

    def accepts(auth_mode: str) -> bool:
        """Return whether a new process can connect with this RAY_AUTH_MODE, which Ray reads only on import."""
        command = [sys.executable, "-c", ray_internals.PROBE, address]
        env = {**os.environ, "RAY_AUTH_MODE": auth_mode}
        try:
            return subprocess.run(command, env=env, capture_output=True, timeout=30).returncode == 0
        except subprocess.TimeoutExpired:
            return False

    if accepts("disabled"):
        remedy = "start the cluster with RAY_AUTH_MODE=token (docs/concepts/security.md), or set cluster.insecure=true"
        raise UserInputError(f"{named}: accepts unauthenticated connections; {remedy}")
    if not accepts("token"):
        remedy = "set RAY_AUTH_TOKEN_PATH, or write its token to ~/.ray/auth_token"
        raise UserInputError(f"{named}: no Ray cluster responds, or it requires a different token; {remedy}")


def list_nodes() -> list[dict[str, Any]]:
    """Return Ray's state of each node, or an empty list while the head does not respond, for example during a restart.

    Raises ClusterError if the driver's node is dead: its raylet ended, or the head removed the node, for example
    because the network was down for longer than the head's health checks allow. Ray then delivers no more results to
    this process but reports no error, so the caller must end the sweep.
    """
    if head.is_away():
        return []
    entries, own_id = ray.nodes(), ray.get_runtime_context().get_node_id()
    if any(entry["Alive"] and entry["NodeID"] == own_id for entry in entries):
        return list(entries)
    address = next((entry["NodeManagerAddress"] for entry in entries if entry["NodeID"] == own_id), "here")
    remedy = "finished trials are kept. On a cluster, start Ray on it again"
    raise ClusterError(f"the driver's node {address} is dead: its raylet ended, or the head lost it; {remedy}")


class NodeDiscovery:
    """Polls the connected cluster for nodes that are up. Polling never waits for a node."""

    def __init__(self) -> None:
        self._descriptions: dict[str, Any] = {}  # references to pending descriptions, by Ray's node id

    def poll(self, known: set[str]) -> tuple[list[Node], set[str]]:
        """Return the nodes that are up, described and not in `known`, and the ids of all nodes that are up.

        If a node's description is pending or has failed, the next call tries again. While the head does not respond,
        this method returns no new nodes, and `known` as the ids, because trials go on without the head.

        Raises ClusterError in the same cases as `list_nodes`.
        """
        if not (entries := list_nodes()):
            return [], known
        up = {entry["NodeID"]: entry for entry in entries if entry["Alive"]}
        self._descriptions = {node_id: ref for node_id, ref in self._descriptions.items() if node_id in up}
        self._descriptions |= {
            node_id: _request_description(entry)
            for node_id, entry in up.items()
            if node_id not in known | self._descriptions.keys()
        }
        nodes = []
        for node_id, ref in list(self._descriptions.items()):
            if ray.wait([ref], timeout=0)[0]:
                del self._descriptions[node_id]
                with contextlib.suppress(RayError):
                    found, description = ray.get(ref)
                    problem = _code.find_problem(found)
                    nodes.append(build_node(up[node_id], None if problem else description, problem))
        return nodes, set(up)


def start(target: Target, *, has_variables: bool) -> None:
    """Start a local cluster unless `discover_nodes` has already connected to one.

    The local cluster ends with this process, even if the process is killed. Without `has_variables`, the cluster cannot
    start workers with their own environment variables.

    Raises ClusterError if Ray does not start.
    """
    global _orphans
    if ray.is_initialized():
        return
    # Each worker takes one core and one GPU, but a container may have fewer cores than GPUs.
    cpus = max(target.nodes[0].cpus, target.nodes[0].gpus)
    for is_last in (False, True):
        try:
            provide_token(os.environ)
            needs_agent = has_variables or ray_internals.gives_workers_an_environment()
            with ray_internals.without_unused_processes(runtime_environments=needs_agent) as started:
                # "local" ignores any address file that another cluster left behind.
                init_ray(address="local", num_cpus=cpus, object_store_memory=128 * 2**20)
            break
        except Exception as error:  # Ray raises its own exceptions, built-in exceptions and OSError
            cause = summarize_ray_error(error)
            if is_last or ray_internals.SLOW_START not in cause.lower():
                raise ClusterError(f"Ray does not start on this machine: {cause}") from error
            for process in started:
                process.kill()
            load = os.getloadavg()[0]
            notify(f"sweeper: Ray did not start in time (load average {load:.0f}); trying once more")
    _orphans = Orphans()


_orphans: Orphans | None = None  # set only for a local cluster, which ends with this process


def end_orphans() -> list[str]:
    """End processes left by killed workers or a dead raylet. Return the command lines of those that trials started."""
    return [command for command in _orphans.end() if not command.startswith("ray::")] if _orphans else []


def init_ray(**options: Any) -> None:
    """Call `ray.init` with this project's defaults and start watching the head."""
    for name, value in {"RAY_USAGE_STATS_ENABLED": "0", **ray_internals.SETTINGS}.items():
        os.environ.setdefault(name, value)
    umask = os.umask(0o077)  # Ray writes an access token, which only the user may read
    try:
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        ray.init(include_dashboard=False, namespace="sweeper", **quiet, **options)
    finally:
        os.umask(umask)
    head.watch(ray.get_runtime_context().gcs_address)


def stop() -> None:
    """Disconnect from the cluster, and shut it down if this process started it."""
    head.watch(None)
    ray.shutdown()
    end_orphans()


def summarize_ray_error(error: BaseException) -> str:
    """Return the cause of an error in one line, because Ray's messages span many."""
    text = str(error)
    if ray_internals.CRASHED in text:
        return "its process ended unexpectedly: killed, or crashed"
    if exit_detail := re.search(ray_internals.EXIT_DETAIL + r"(.*?)(?: Some common causes|\n|$)", text):
        return exit_detail[1].rstrip(". ")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    causes = [line for line in lines if "because" in line or "terminated" in line]
    return (causes or lines or [type(error).__name__])[0][:200]
