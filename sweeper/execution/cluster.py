"""Ray: what a cluster has, connecting to one or starting one."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import ray
from ray._private.authentication.authentication_token_setup import _enable_token_auth
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from sweeper.common.errors import UserInputError
from sweeper.config.hardware import Node, Target
from workloads.api import host

ANSWERS_WITHIN_S = 60.0
HEAD_ASKED_EVERY_S, HEAD_PATIENCE_S = 5.0, 30.0


class ClusterTrouble(Exception):
    """The cluster cannot run anything, or not any more. Nothing finished is lost; the message says what happened."""


# ── what there is ───────────────────────────────────────────────────────────────────────────────────────────


def look(address: str | None, insecure: bool = False) -> list[Node]:
    """The nodes of the cluster at `address`, which it connects to, or without one of this machine.

    Nothing is started. Raises UserInputError where no cluster answers, and unless `insecure` where one that other
    machines can reach asks for no token.
    """
    stop()  # what an earlier sweep of this process may have left connected
    address = address or os.environ.get("RAY_ADDRESS")
    if address in (None, "local"):
        if not insecure and (mode := os.environ.get("RAY_AUTH_MODE", "token")).lower() != "token":
            raise UserInputError(
                f"RAY_AUTH_MODE={mode}: Ray listens on every interface; token, or cluster.insecure=true"
            )
        return [_this_machine()]
    try:
        if found := re.fullmatch(r"(?:ray://)?([^:/]+):(\d+)", address):
            # Ray itself tries for minutes, aloud.
            socket.create_connection((found[1], int(found[2])), timeout=5).close()
            _watch_head(f"{found[1]}:{found[2]}")
        if not insecure:
            _check_token(address)
        _init(address=address)
    except (OSError, ValueError, RuntimeError) as error:
        why = "start one with `ray start --head`" if address == "auto" else brief(error)
        raise UserInputError(f"cluster.address={address}: no Ray cluster answers there ({why})") from error
    return _that_answer([entry for entry in ray.nodes() if entry["Alive"]])


def _that_answer(entries: list[dict[str, Any]]) -> list[Node]:
    """A node may be lost just now: it is left out, and said. Raises UserInputError where none answers."""
    found, silent = [], list[str]()
    for entry, answer in [(entry, _ask(entry)) for entry in entries]:
        try:
            found.append(_node(entry, ray.get(answer, timeout=ANSWERS_WITHIN_S)))
        except (RayError, GetTimeoutError) as error:
            silent.append(f"cluster: node {entry['NodeManagerAddress']} does not run tasks ({brief(error)})")
    if silent and not found:
        raise UserInputError(silent[0])
    for why in silent:
        print(f"sweeper: left out, {why}", file=sys.stderr)
    return found


def _check_token(address: str) -> None:
    """Raises UserInputError for a cluster that lets in whoever comes, and for one that does not let us in."""
    if address.startswith("ray://"):
        raise UserInputError(
            f"cluster.address={address}: whether it asks for a token cannot be seen through ray://;"
            " give HOST:PORT of its head, or cluster.insecure=true"
        )
    if _admits(address, RAY_AUTH_MODE="disabled"):
        raise UserInputError(
            f"cluster.address={address}: it lets in whoever reaches it; start it with RAY_AUTH_MODE=token"
            " (docs/clusters.md), or say cluster.insecure=true"
        )
    if not _admits(address, RAY_AUTH_MODE="token"):
        raise UserInputError(
            f"cluster.address={address}: no Ray cluster answers there, or it asks for another token than ours"
            " (RAY_AUTH_TOKEN_PATH, or else ~/.ray/auth_token)"
        )
    _enable_token_auth()  # Ray does that by itself for `auto`, and for no address that is given


def _admits(address: str, **environment: str) -> bool:
    """Whether a program with this environment may join. In a process of its own: Ray reads the mode on import."""
    knock = "import sys; from ray._private import services; from ray._raylet import GcsClient;"
    knock += "GcsClient(address=services.canonicalize_bootstrap_address(sys.argv[1]))"
    command = [sys.executable, "-c", knock, address]
    try:
        done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, timeout=30)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def _this_machine() -> Node:
    # What Ray itself would find here when it starts, so that what is promised now is there then.
    from ray._private.accelerators import get_accelerator_manager_for_resource

    manager = get_accelerator_manager_for_resource("GPU")
    visible = manager.get_current_process_visible_accelerator_ids()
    found = manager.get_current_node_num_accelerators()
    gpus = min(found, len(visible)) if visible is not None else found
    names, used = host.gpu_names(), tuple(enumerate(host.gpus_used_gib()))
    if visible is not None and all(entry.isdigit() and int(entry) < len(names) for entry in visible):
        names, used = tuple(names[int(entry)] for entry in visible), tuple(used[int(entry)] for entry in visible)
    elif visible is not None:
        used = ()  # by names of their own: which is which is not known here
    return Node(
        address="this machine",
        cpus=len(os.sched_getaffinity(0)),
        cpu_name=host.cpu_name(),
        gpus=gpus,
        accelerator=manager.get_current_node_accelerator_type() if gpus else None,
        gpu_names=tuple(filter(None, names)) if gpus else (),
        gpus_used_gib=used if gpus else (),
        cpu_architecture=host.cpu_architecture(),
    )


def _ask(entry: dict[str, Any]) -> Any:
    """A reference to what a node will say of itself."""
    there = NodeAffinitySchedulingStrategy(node_id=entry["NodeID"], soft=False)
    return ray.remote(_names).options(num_cpus=0, scheduling_strategy=there).remote()


def _node(entry: dict[str, Any], answer: tuple[str, str, tuple[str, ...]]) -> Node:
    resources, (cpu_name, cpu_architecture, gpu_names) = entry["Resources"], answer
    gpus = int(resources.get("GPU", 0))
    return Node(
        address=entry["NodeManagerAddress"],
        cpus=int(resources.get("CPU", 0)),
        cpu_name=cpu_name,
        gpus=gpus,
        accelerator=next((key.split(":", 1)[1] for key in resources if key.startswith("accelerator_type:")), None),
        gpu_names=tuple(filter(None, gpu_names)) if gpus else (),
        id=entry["NodeID"],
        cpu_architecture=cpu_architecture,
        memory_gib=resources.get("memory", 0.0) / 2**30,
    )


class NodeDiscovery:
    """Sees which nodes of the connected cluster are up, and waits for none of them."""

    def __init__(self) -> None:
        self._asked: dict[str, Any] = {}  # references to what nodes will say of themselves, by Ray's ids

    def look(self, known: set[str]) -> tuple[list[Node], set[str]]:
        """The nodes that are up, are not among the known and have said what they are; and the ids of all that are up.
        One that does not answer, or not yet, is asked or looked at again the next time."""
        up = {entry["NodeID"]: entry for entry in ray.nodes() if entry["Alive"]}
        self._asked = {node: answer for node, answer in self._asked.items() if node in up}
        self._asked |= {node: _ask(entry) for node, entry in up.items() if node not in known | self._asked.keys()}
        found = []
        for node, answer in list(self._asked.items()):
            if ray.wait([answer], timeout=0)[0]:
                del self._asked[node]
                with contextlib.suppress(RayError):
                    found.append(_node(up[node], ray.get(answer)))
        return found, set(up)


def _names() -> tuple[str, str, tuple[str, ...]]:
    return host.cpu_name(), host.cpu_architecture(), host.gpu_names()


# ── its head ────────────────────────────────────────────────────────────────────────────────────────────────


def _leave(address: str) -> None:
    os.write(2, f"sweeper: the cluster's head {address} does not answer any more; nothing was started\n".encode())
    os._exit(1)


_when_lost: list[Callable[[str], None]] = [_leave]
_watch_over = threading.Event()


def _watch_head(address: str) -> None:
    """Say so once the head there has not answered for a while, instead of any other. From a thread: Ray waits a minute
    for a head inside whatever is asked of it, and then ends the process."""
    global _watch_over
    _watch_over.set()
    _watch_over = over = threading.Event()
    host, _, port = address.rpartition(":")

    def watch() -> None:
        answered_s = time.monotonic()
        while not over.wait(HEAD_ASKED_EVERY_S):
            try:
                socket.create_connection((host.strip("[]"), int(port)), timeout=HEAD_ASKED_EVERY_S).close()
                answered_s = time.monotonic()
            except OSError:
                if time.monotonic() - answered_s > HEAD_PATIENCE_S:
                    return _when_lost[-1](address)

    threading.Thread(target=watch, daemon=True).start()


@contextlib.contextmanager
def head_watched(lost: Callable[[str], None]) -> Iterator[None]:
    """Call `lost` with the address of the connected cluster's head should it answer no longer."""
    _when_lost.append(lost)
    try:
        yield
    finally:
        _when_lost.pop()


# ── starting and stopping ───────────────────────────────────────────────────────────────────────────────────


def start(target: Target) -> None:
    """Start a local cluster, unless `look` has connected to one. It ends with this process, even a killed one. Raises
    ClusterTrouble."""
    if ray.is_initialized():
        return
    try:
        # "local" also where an address file of another cluster lies about.
        _init(address="local", num_cpus=target.nodes[0].cpus, object_store_memory=128 * 2**20)
    except Exception as error:  # Ray raises its own, plain ones and those of the system
        raise ClusterTrouble(f"Ray does not start on this machine: {brief(error)}") from error


def _init(**options: Any) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # A Python process for each core of the machine, before anybody has asked for one, of which a sweep needs few.
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # the coming default; without it Ray warns
    umask = os.umask(0o077)  # Ray writes its access token with the umask
    try:
        ray.init(
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            namespace="sweeper",
            **options,
        )
    finally:
        os.umask(umask)
    _watch_head(ray.get_runtime_context().gcs_address)


def stop() -> None:
    """Leave the cluster, and end it if it is ours."""
    _watch_over.set()
    ray.shutdown()


def brief(error: BaseException) -> str:
    """What happened, out of the many lines in which Ray says it."""
    text = str(error)
    if "connection error code 2" in text:
        return "its process ended unexpectedly: killed, or crashed"
    if found := re.search(r"exit detail: (.*?)(?: Some common causes|\n|$)", text):
        return found[1].rstrip(". ")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    telling = [line for line in lines if "because" in line or "terminated" in line]
    return (telling or lines or [type(error).__name__])[0][:200]
