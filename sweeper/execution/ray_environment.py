"""Prepare the settings that Ray reads on import, such as the visible GPUs, in this process."""

import atexit
import os
import secrets
import shlex
import shutil
import sys
import tempfile
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from workloads.api import gpu_setup, visible_devices
from workloads.api.errors import UserInputError, describe_os_error

SOCKET, MAX_SOCKET_PATH = "/ray/session_2026-11-25_13-16-02_926810_1234567/sockets/plasma_store.12", 107
MIN_FREE_MIB = 8  # of a short sweep, Ray keeps 0.1 MiB of logs


def prepare(address: str | None = None, insecure: bool = False) -> None:
    """Set this process's GPUs where Ray reads them, and let it use a token for the cluster at `address`.

    For `auto` and on this machine Ray uses a token by itself, but not for an explicit address.

    Raises UserInputError if an installed package breaks Ray's import, or RAY_TMPDIR or TMPDIR prevents its start.
    """
    _unify_devices(os.environ)
    _shorten_sockets(os.environ)
    if find_address(address) is None:
        _check_folder(os.environ)
    elif not insecure:
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    if problem := gpu_setup.find_broken_amdsmi():
        raise UserInputError(str(problem))


def provide_token(variables: MutableMapping[str, str]) -> None:
    """Write the token of local clusters to ~/.ray, as Ray does, or to a file of this process if that fails."""
    if variables.get("RAY_AUTH_TOKEN") or variables.get("RAY_AUTH_TOKEN_PATH"):
        return
    path, token = Path.home() / ".ray" / "auth_token", secrets.token_hex(32)
    try:
        if path.exists():
            if path.read_text():
                return
            path.unlink()  # a full disk has left it
        path.parent.mkdir(exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent) as file:
            file.write(token)
            file.flush()
            os.link(file.name, path)
    except FileExistsError:  # another process was first
        return
    except OSError as error:
        descriptor, variables["RAY_AUTH_TOKEN_PATH"] = tempfile.mkstemp(prefix="ray-token-")
        atexit.register(Path(variables["RAY_AUTH_TOKEN_PATH"]).unlink, missing_ok=True)
        os.write(descriptor, token.encode())
        os.close(descriptor)
        where = f"Ray's token is in {variables['RAY_AUTH_TOKEN_PATH']} until this sweep ends"
        print(f"sweeper: HOME={Path.home()}: {describe_os_error(error)}; {where}", file=sys.stderr)


def find_address(address: str | None) -> str | None:
    """Return the address of the cluster to join, by default that in RAY_ADDRESS; None: start one on this machine."""
    address = address or os.environ.get("RAY_ADDRESS")
    return None if address == "local" else address


def name_address(address: str | None) -> str:
    """Return the name of the setting or variable that has the address of the cluster to join, for messages."""
    return f"cluster.address={address}" if address else f"RAY_ADDRESS={os.environ.get('RAY_ADDRESS')}"


def _shorten_sockets(variables: MutableMapping[str, str]) -> None:
    """Let Ray create its sockets in /tmp where their paths below TMPDIR would be too long for the system."""
    name = "RAY_TMPDIR" if variables.get("RAY_TMPDIR") else "TMPDIR"
    if len(os.fsencode(variables.get(name, ""))) + len(SOCKET) <= MAX_SOCKET_PATH:
        return
    problem = f"{name}={variables[name]}: is too long for the paths of Ray's sockets"
    if name == "RAY_TMPDIR":
        raise UserInputError(f"{problem}; at most {MAX_SOCKET_PATH - len(SOCKET)} characters, such as RAY_TMPDIR=/tmp")
    print(f"sweeper: {problem}, which are in /tmp", file=sys.stderr)
    variables["RAY_TMPDIR"] = "/tmp"


def _check_folder(variables: Mapping[str, str]) -> None:
    """Refuse a full or read-only folder for Ray's files: Ray waits 30 s for its processes and reports no cause."""
    name = next((name for name in ("RAY_TMPDIR", "TMPDIR") if variables.get(name)), "")
    folder = Path(variables[name] if name else "/tmp").absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())  # Ray makes the rest
    free_mib, is_writable = shutil.disk_usage(existing).free >> 20, os.access(existing, os.W_OK | os.X_OK)
    if free_mib < MIN_FREE_MIB or not is_writable:
        problem = f"has {free_mib} MiB free, Ray needs {MIN_FREE_MIB}" if is_writable else "cannot be written"
        raise UserInputError(f"{name or 'TMPDIR'}={folder}: {problem}; set RAY_TMPDIR to another folder")


def shell_commands() -> str:
    """Return the commands that do the same in a shell, which then starts Ray."""
    variables = dict(os.environ)
    _unify_devices(variables)
    changed = {name: value for name, value in variables.items() if os.environ.get(name) != value}
    lines = [f"export {name}={shlex.quote(value)}" for name, value in changed.items()]
    return "\n".join([*lines, *(f"unset {name}" for name in os.environ.keys() - variables.keys())])


def _unify_devices(variables: MutableMapping[str, str]) -> None:
    if gpu_setup.NVIDIA not in gpu_setup.present_vendors():
        visible_devices.unify(variables)
