"""The open ports of a node of a virtual network, and what a client without rights gets from them."""

import importlib
import ipaddress
import json
import pkgutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support import stranger
from tests.support.virtual_network import Node

LISTEN = "0A"  # of /proc/net/tcp
# Ray has no Python description of this service (src/ray/protobuf/object_manager.proto).
OBJECT_MANAGER = [f"ray.rpc.ObjectManagerService/{name}" for name in ("Push", "Pull", "FreeObjects")]
HTTP = "/"


@dataclass(frozen=True)
class Listener:
    """A listening socket."""

    node: Node
    address: str  # what it is bound to
    port: int
    command: str  # the command line of a process that has it

    @property
    def is_open_to_all(self) -> bool:
        return ipaddress.ip_address(self.address).is_unspecified

    @property
    def is_local(self) -> bool:
        return ipaddress.ip_address(self.address).is_loopback


def listeners(node: Node) -> list[Listener]:
    """Return the listening TCP sockets of a node, from the tables of its network namespace."""
    commands = _commands_by_socket(node)
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{node.pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTEN:
                address, _, port = fields[1].partition(":")
                found.append(Listener(node, _address(address), int(port, 16), commands.get(fields[9], "")))
    return found


def _address(text: str) -> str:
    """Return an address of the kernel's table: words of four bytes in the order of this machine."""
    words = [bytes.fromhex(text[start : start + 8]) for start in range(0, len(text), 8)]
    swapped = b"".join(word[::-1] if sys.byteorder == "little" else word for word in words)
    address = ipaddress.ip_address(swapped)
    return str(getattr(address, "ipv4_mapped", None) or address)  # ::ffff:127.0.0.1 is 127.0.0.1


def _commands_by_socket(node: Node) -> dict[str, str]:
    commands = {}
    for pid in node.pids():
        with suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    target = str(descriptor.readlink())
                    if target.startswith("socket:["):
                        commands[target[8:-1]] = command
    return commands


def ray_methods() -> list[str]:
    """Return every method of every gRPC service of Ray."""
    generated = importlib.import_module("ray.core.generated")
    names = [module.name for module in pkgutil.iter_modules(generated.__path__) if module.name.endswith("_pb2")]
    modules = [importlib.import_module(f"ray.core.generated.{name}") for name in names]
    services = [service for module in modules for service in module.DESCRIPTOR.services_by_name.values()]
    return [f"{service.full_name}/{method.name}" for service in services for method in service.methods] + OBJECT_MANAGER


def call_from(node: Node, folder: Path, calls: Iterable[tuple[str, int, str]], token: str = "") -> list[Any]:
    """Make calls (host, port, method) from a node. Returns what `tests.support.stranger` prints of each."""
    file = folder / "calls"
    file.write_text("".join(f"{host} {port} {method}\n" for host, port, method in calls))
    command = [sys.executable, stranger.__file__, str(file), *([token] if token else [])]
    result = node.run(*command, check=True)
    return [json.loads(line) for line in result.stdout.splitlines()]


def command_lines(nodes: Iterable[Node]) -> Iterator[str]:
    """Yield the command lines of all processes of the nodes."""
    for node in nodes:
        for pid in node.pids():
            with suppress(OSError):
                yield Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")


def environments(nodes: Iterable[Node]) -> Iterator[str]:
    """Yield the environment variables of all processes of the nodes."""
    for node in nodes:
        for pid in node.pids():
            with suppress(OSError):
                yield Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
