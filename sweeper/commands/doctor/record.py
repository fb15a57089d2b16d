"""Record the drivers, devices and software of a machine, to build a mock of the machine elsewhere.

The record contains the raw result of each driver call by `workloads.api.gpus`, torch's report on its build and devices,
Ray's view of the nodes, kernel settings, and versions. Numbered placeholders replace host names, user names, serial
numbers, UUIDs and addresses. The only environment variables in the record are those that select the visible devices.
"""

import contextlib
import ctypes
import getpass
import json
import os
import platform
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from enum import Enum
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from sweeper.config.hardware import Node
from sweeper.tracking.provenance import PACKAGES
from workloads.api import host
from workloads.api.errors import UserInputError
from workloads.api.gpus import amd, open_gpus
from workloads.api.host import describe_gpu
from workloads.api.secrets import mask, masked

FORMAT = 1  # the version of the record format
VISIBLE_DEVICES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
TORCH_TIMEOUT_S = 180


def write_record(path: Path, nodes: Sequence[Node] | UserInputError) -> dict[str, Any]:
    """Write and return this machine's record. `nodes` is Ray's view of the nodes, or the error that prevented it."""
    import pynvml

    calls: dict[str, list[dict[str, Any]]] = {}
    with contextlib.ExitStack() as stack:
        for prefix, module in {"nvml": pynvml, "amdsmi": amd.load_amdsmi()}.items():
            if module is not None:
                calls[prefix] = stack.enter_context(record_calls(module, prefix))
        gpus = stack.enter_context(open_gpus())
        described = [describe_gpu(gpu) for gpu in gpus]
        for gpu in gpus:
            if gpu.identity.responds:
                gpu.process_ids()
                gpu.read()
    machine = {
        "format": FORMAT,
        "versions": {"python": platform.python_version()} | {name: host.version_of(name) for name in PACKAGES},
        "system": platform.platform(),
        "kernel": host.read_kernel(),
        "cpu": {"name": host.cpu_name(), "cores": os.cpu_count(), "memory_gib": host.memory_bytes() / 2**30},
        "has_kfd": Path("/dev/kfd").exists(),
        "visible_devices": {name: os.environ[name] for name in VISIBLE_DEVICES if name in os.environ},
        "gpus": described,
        "driver_calls": calls,
        "torch": _read_torch(),
        "ray": {"error": str(nodes)} if isinstance(nodes, UserInputError) else [asdict(node) for node in nodes],
    }
    record: dict[str, Any] = _Mask().mask(masked(machine))
    path.write_text(json.dumps(record, indent=1) + "\n")
    return record


@contextlib.contextmanager
def record_calls(module: ModuleType, prefix: str) -> Iterator[list[dict[str, Any]]]:
    """Record arguments and results of calls to the module's `prefix…` functions until the block ends. A handle is
    recorded as its GPU's index."""
    calls: list[dict[str, Any]] = []
    handles: list[Any] = []

    def call(name: str, function: Callable[..., Any], /, *arguments: Any, **keywords: Any) -> Any:
        values = [*arguments, *keywords.values()]
        entry: dict[str, Any] = {"call": name, "arguments": [_plain(value, handles) for value in values]}
        calls.append(entry)
        try:
            result = function(*arguments, **keywords)
        except Exception as error:
            entry["raises"] = f"{type(error).__name__}: {error}"
            raise
        if "Handle" in name or "handles" in name:
            handles.extend(result if isinstance(result, list) else [result])
        entry["returns"] = _plain(result, handles)
        return result

    named = {name: value for name, value in vars(module).items() if name.startswith(prefix)}
    functions = {name: value for name, value in named.items() if callable(value) and not isinstance(value, type)}
    for name, function in functions.items():
        setattr(module, name, partial(call, name, function))
    try:
        yield calls
    finally:
        for name, function in functions.items():
            setattr(module, name, function)


def _plain(value: Any, handles: Sequence[Any]) -> Any:
    for number, handle in enumerate(handles):
        if value is handle:
            return f"handle {number}"
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, bool | int | float | str) or value is None:
        return value
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, ctypes.Structure):
        return {field[0]: _plain(getattr(value, field[0]), handles) for field in value._fields_}
    if isinstance(value, dict):
        # A process name may be private information of another user.
        return {str(key): _plain(inner, handles) for key, inner in value.items() if key != "name"}
    if isinstance(value, list | tuple | ctypes.Array):
        return [_plain(inner, handles) for inner in value]
    return _plain(vars(value), handles) if hasattr(value, "__dict__") else f"<{type(value).__name__}>"


def _read_torch() -> dict[str, Any]:
    """Get torch's report from a separate process, because `sweeper` never imports torch."""
    command = [sys.executable, "-m", "workloads.instruments.device"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=TORCH_TIMEOUT_S)
        report: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
        return report
    except (subprocess.SubprocessError, IndexError, json.JSONDecodeError):
        return {"error": "torch does not start: run python -m workloads.instruments.device"}


SHORTEST_NAME = 4  # host and user names with at least this many characters are masked everywhere
_KEY = re.compile(r"(?i)serial|uuid|hostname|node_?id|^(host|node|address|id)$")
_UUID = re.compile(r"(?i)\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b")
_OCTET = r"(?:25[0-5]|2[0-4]\d|1?\d?\d)"
_IPV4 = re.compile(rf"(?<![\w.]){_OCTET}(?:\.{_OCTET}){{3}}(?![\w.])")


def mask_text(text: str) -> str:
    """Mask secrets and this machine's identifiers in a text, such as a log."""
    return _Mask().mask_text(mask(text))


class _Mask:
    """A mask for this machine's identifiers. Equal identifiers, as in a GPU's partitions, share a placeholder."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        host = socket.gethostname()
        names = {str(Path.home()): "<home>", host: "<host>", host.partition(".")[0]: "<host>"}
        with contextlib.suppress(KeyError, OSError):  # the user may have no entry in the password file
            names[getpass.getuser()] = "<user>"
        self._names = {name: names[name] for name in sorted(names, key=len, reverse=True) if len(name) >= SHORTEST_NAME}

    def mask(self, value: Any, key: str = "") -> Any:
        """Return the JSON value stored under `key` with all identifiers masked."""
        if isinstance(value, dict):
            return {key: self.mask(inner, key) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [self.mask(inner) for inner in value]
        if not isinstance(value, str):
            return value
        return self._placeholder(value) if value and _KEY.search(key) else self.mask_text(value)

    def mask_text(self, text: str) -> str:
        for name, placeholder in self._names.items():
            text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", placeholder, text)
        for pattern in (_UUID, _IPV4):
            text = pattern.sub(lambda match: self._placeholder(match[0]), text)
        return text

    def _placeholder(self, identifier: str) -> str:
        return f"masked-{self._numbers.setdefault(identifier, len(self._numbers) + 1)}"
