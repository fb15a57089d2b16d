"""Nodes on this machine with an address, host name, `/tmp` and `/dev/shm` of their own: namespaces joined by a bridge.

The first process of a node ends with the process that created the node, and with it all others, since they share its
PID namespace. Links and addresses end with the network namespaces. So a killed test leaves nothing.
"""

import ctypes
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

REPOSITORY = Path(__file__).resolve().parents[2]
SUBNET = "10.77.0"
TOOLS = ("ip", "tc", "unshare", "nsenter", "mount")
ISOLATED = ["--net", "--mount", "--uts", "--ipc", "--pid"]
SHM_MIB = 512
DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of prctl(2)
LIBC = ctypes.CDLL(None)

# Keeps the folders that nodes share where they are, also below /tmp, and ends orphans as an init process does.
FIRST_PROCESS = r"""
set -e
name=$1 tmp_size=$2 shm_size=$3; shift 3
mount -t tmpfs tmpfs /mnt
printf '%s\n' "$HOSTS" > /mnt/hosts
mount --bind /mnt/hosts /etc/hosts
number=0
for folder in "$@"; do mkdir /mnt/$number; mount --bind "$folder" /mnt/$number; number=$((number + 1)); done
mount -t tmpfs -o size=$tmp_size,mode=1777 tmpfs /tmp
mount -t tmpfs -o size=$shm_size,mode=1777 tmpfs /dev/shm
number=0
for folder in "$@"; do mkdir -p "$folder"; mount --bind /mnt/$number "$folder"; number=$((number + 1)); done
hostname "$name"
ip link set lo up
echo ready
trap : CHLD
while :; do sleep infinity & wait $! || :; done
"""


def missing_reason() -> str:
    """Return why this machine cannot have such nodes, or an empty string."""
    if os.geteuid() != 0:
        return "namespaces need root"
    if missing := [tool for tool in TOOLS if not shutil.which(tool)]:
        return f"not installed: {', '.join(missing)} (iproute2, util-linux)"
    tried = subprocess.run(["unshare", *ISOLATED, "--fork", "--mount-proc", "true"], capture_output=True, text=True)
    return f"this machine allows no namespaces: {tried.stderr.strip()}" if tried.returncode else ""


def _die_with_parent() -> None:
    LIBC.prctl(DIE_WITH_PARENT, signal.SIGKILL)


def child_of(pid: int) -> int:
    """Return the only child of a process."""
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


@dataclass
class Node:
    """One node: its first process, seen from outside, and how to run commands in it."""

    name: str
    address: str
    creator: subprocess.Popen[str]  # `unshare`, the parent of the first process
    pid: int = field(init=False)

    def __post_init__(self) -> None:
        assert self.creator.stdout is not None
        line = self.creator.stdout.readline()
        if line != "ready\n":
            raise RuntimeError(f"node {self.name} did not start: {line}{self.creator.communicate()[0]}")
        self.pid = child_of(self.creator.pid)

    def command(self, *command: str, folder: Path | str = "/") -> list[str]:
        """Return the command line that runs `command` in the node."""
        enter = ["nsenter", f"--target={self.pid}", *ISOLATED, "--"]
        return [*enter, "env", f"--chdir={folder}", *command]

    def run(self, *command: str, **options: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.run(self.command(*command), capture_output=True, text=True, **options)

    def start(self, *command: str, folder: Path | str = "/", **options: Any) -> subprocess.Popen[str]:
        return subprocess.Popen(self.command(*command, folder=folder), text=True, start_new_session=True, **options)

    def ip(self, *arguments: str) -> None:
        subprocess.run(["nsenter", f"--target={self.pid}", "--net", "ip", *arguments], check=True)

    def pids(self) -> list[int]:
        """Return the processes of the node, but its first, as this machine counts them."""
        pids = []
        with suppress(OSError):
            namespace = Path(f"/proc/{self.pid}/ns/pid").readlink()
            for entry in Path("/proc").iterdir():
                with suppress(OSError):
                    if entry.name.isdigit() and (entry / "ns/pid").readlink() == namespace:
                        pids.append(int(entry.name))
        return [pid for pid in pids if pid != self.pid]

    def pids_of(self, program: str) -> list[int]:
        """Return the processes of the node whose command line begins so."""
        found = []
        for pid in self.pids():
            with suppress(OSError):
                if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(program.encode()):
                    found.append(pid)
        return found

    def kill(self) -> None:
        """End the node as a machine without power ends: every process at once, its links with it."""
        self.creator.kill()
        self.creator.wait()


def send_signal(process: subprocess.Popen[str], number: int) -> None:
    """Send a signal to the process that `Node.start` started: the child of `nsenter`, which passes none on."""
    os.kill(child_of(process.pid), number)


class Network:
    """Nodes on one switch. All of them see the checkout and its Python environment where this process sees them.

    Args:
        names: the nodes; they get the addresses 10.77.0.11, 10.77.0.12 and so on.
        shared: a folder that they share, too.
    """

    def __init__(self, names: Sequence[str], shared: Path) -> None:
        self.addresses = {name: f"{SUBNET}.{11 + number}" for number, name in enumerate(names)}
        folders = (shared, REPOSITORY, Path(sys.prefix))
        self._shared = [str(path) for path in folders if path.is_relative_to("/tmp")]  # else no node hides it
        self._switch = subprocess.Popen(["unshare", "--net", "sleep", "infinity"], preexec_fn=_die_with_parent)
        self.nodes: dict[str, Node] = {}
        try:
            own_namespace = Path("/proc/self/ns/net").readlink()
            while Path(f"/proc/{self._switch.pid}/ns/net").readlink() == own_namespace:
                pass  # until unshare has made the new one
            self._on_switch("ip", "link", "add", "bridge", "type", "bridge")
            self._on_switch("ip", "link", "set", "bridge", "up")
            for name in names:
                self.add(name)
        except BaseException:
            self.close()
            raise

    def _on_switch(self, *command: str) -> None:
        subprocess.run(["nsenter", f"--target={self._switch.pid}", "--net", *command], check=True)

    def add(self, name: str, tmp_mib: int = 2048) -> Node:
        """Start a node under its name and address; also one that was killed."""
        hosts = "\n".join(["127.0.0.1 localhost", *(f"{address} {host}" for host, address in self.addresses.items())])
        arguments = [name, f"{tmp_mib}m", f"{SHM_MIB}m", *self._shared]
        creator = subprocess.Popen(
            [
                "unshare",
                *ISOLATED,
                "--fork",
                "--kill-child",
                "--mount-proc",
                "bash",
                "-c",
                FIRST_PROCESS,
                "sh",
                *arguments,
            ],
            env={**os.environ, "HOSTS": hosts},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
        node = self.nodes[name] = Node(name, self.addresses[name], creator)
        self._delete_link(name)
        self._on_switch("ip", "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", str(node.pid))
        self._on_switch("ip", "link", "set", name, "master", "bridge", "up")
        node.ip("address", "add", f"{node.address}/24", "dev", "eth0")
        node.ip("link", "set", "eth0", "up")
        return node

    def _delete_link(self, name: str) -> None:
        """Remove what is left of a killed node's link: the kernel removes it some time after the last process."""
        command = ["nsenter", f"--target={self._switch.pid}", "--net", "ip", "link", "delete", name]
        subprocess.run(command, stderr=subprocess.DEVNULL)

    def disconnect(self, name: str) -> None:
        """Cut a node's link; what it sends is lost, and so is what others send to it."""
        self._on_switch("ip", "link", "set", name, "down")

    def connect(self, name: str) -> None:
        self._on_switch("ip", "link", "set", name, "up")

    def block(self, source: str, target: str) -> None:
        """Drop what one node sends to another; what the other sends still arrives."""
        self.nodes[source].ip("route", "add", "blackhole", self.addresses[target])

    def unblock(self, source: str, target: str) -> None:
        self.nodes[source].ip("route", "delete", "blackhole", self.addresses[target])

    def limit_rate(self, name: str, kbit_s: int, queue: str = "burst 32kb latency 500ms") -> None:
        """Let a node receive no more than this, and wait for the rest in a queue of half a second, or lose it."""
        self._on_switch("tc", "qdisc", "replace", "dev", name, "root", "tbf", "rate", f"{kbit_s}kbit", *queue.split())

    def lift_rate(self, name: str) -> None:
        self._on_switch("tc", "qdisc", "delete", "dev", name, "root")

    def close(self) -> None:
        for node in self.nodes.values():
            node.kill()
        self._switch.kill()
        self._switch.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
