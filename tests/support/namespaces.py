"""Network namespaces of tests, named after the process that creates them."""

import os
import re
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

PREFIX = "sweeper"  # then the creator's process id, then letters


def name_namespace(suffix: str = "") -> str:
    """Return the name of a namespace of this process."""
    return f"{PREFIX}{os.getpid()}{suffix}"


def list_namespaces() -> list[str]:
    """Return the namespaces of tests, of this process and of others."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    return [line.split()[0] for line in listed.splitlines() if line.startswith(PREFIX)]


def list_processes(namespace: str) -> list[int]:
    """Return the ids of the processes in a namespace."""
    listed = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True).stdout
    return [int(pid) for pid in listed.split()]


def remove_abandoned() -> None:
    """Remove the namespaces, and the processes in them, that killed tests have left."""
    for name in list_namespaces():
        match = re.fullmatch(rf"{PREFIX}(\d+)[a-z]*", name)
        if match and not Path("/proc", match[1]).exists():
            for pid in list_processes(name):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)
