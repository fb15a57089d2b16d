"""Prepare this process's environment variables for Ray, which reads some of them (such as visible GPUs) on import."""

import atexit
import os
import secrets
import shlex
import shutil
import tempfile
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from workloads.api import gpu_setup, visible_devices
from workloads.api.errors import UserInputError, describe_os_error
from workloads.api.notices import notify

SOCKET, MAX_SOCKET_PATH = "/ray/session_2026-11-25_13-16-02_926810_1234567/sockets/plasma_store.12", 107
MIN_FREE_MIB = 8  # Ray writes 0.1 MiB of logs in a short sweep


def prepare(address: str | None = None, insecure: bool = False) -> None:
    """Set the variable from which Ray reads the visible GPUs, and enable token authentication for `address`.

    By default, Ray uses a token for `auto` and on this machine, but not for an explicit address.

    Raises UserInputError if an installed package breaks the import of Ray, or if RAY_TMPDIR or TMPDIR is unusable.
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
    """Write the token for local clusters to ~/.ray, as Ray does, or to a temporary file if that fails."""
    if variables.get("RAY_AUTH_TOKEN") or variables.get("RAY_AUTH_TOKEN_PATH"):
        return
    path, token = Path.home() / ".ray" / "auth_token", secrets.token_hex(32)
    try:
        if path.exists():
            if path.read_text():
                return
            path.unlink()  # an empty file, left by a full disk
        path.parent.mkdir(exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent) as file:
            file.write(token)
            file.flush()
            os.link(file.name, path)
    except FileExistsError:  # another process has written a token
        return
    except OSError as error:
        descriptor, variables["RAY_AUTH_TOKEN_PATH"] = tempfile.mkstemp(prefix="ray-token-")
        atexit.register(Path(variables["RAY_AUTH_TOKEN_PATH"]).unlink, missing_ok=True)
        os.write(descriptor, token.encode())
        os.close(descriptor)
        where = f"Ray's token is in {variables['RAY_AUTH_TOKEN_PATH']} until this sweep ends"
        notify(f"sweeper: HOME={Path.home()}: {describe_os_error(error)}; {where}")


def find_address(address: str | None) -> str | None:
    """Return the address of the cluster to join (default: RAY_ADDRESS), or None to start one on this machine."""
    address = address or os.environ.get("RAY_ADDRESS")
    return None if address == "local" else address


def name_address(address: str | None) -> str:
    """Return "KEY=VALUE" for the setting or variable with the address of the cluster to join, for use in messages."""
    return f"cluster.address={address}" if address else f"RAY_ADDRESS={os.environ.get('RAY_ADDRESS')}"


def _shorten_sockets(variables: MutableMapping[str, str]) -> None:
    """Make Ray create its sockets in /tmp if TMPDIR would make their paths too long for the system."""
    name = "RAY_TMPDIR" if variables.get("RAY_TMPDIR") else "TMPDIR"
    if len(os.fsencode(variables.get(name, ""))) + len(SOCKET) <= MAX_SOCKET_PATH:
        return
    problem = f"{name}={variables[name]}: is too long for the paths of Ray's sockets"
    if name == "RAY_TMPDIR":
        raise UserInputError(f"{problem}; at most {MAX_SOCKET_PATH - len(SOCKET)} characters, such as RAY_TMPDIR=/tmp")
    notify(f"sweeper: {problem}, which are in /tmp")
    variables["RAY_TMPDIR"] = "/tmp"


def _check_folder(variables: Mapping[str, str]) -> None:
    """Raise UserInputError if Ray's folder is full or read-only. Ray itself would wait 30 s and report no cause."""
    name = next((name for name in ("RAY_TMPDIR", "TMPDIR") if variables.get(name)), "")
    folder = Path(variables[name] if name else "/tmp").absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())  # Ray creates the rest of the path
    free_mib, is_writable = shutil.disk_usage(existing).free >> 20, os.access(existing, os.W_OK | os.X_OK)
    if free_mib < MIN_FREE_MIB or not is_writable:
        problem = f"has {free_mib} MiB free, Ray needs {MIN_FREE_MIB}" if is_writable else "cannot be written"
        raise UserInputError(f"{name or 'TMPDIR'}={folder}: {problem}; set RAY_TMPDIR to another folder")


def shell_commands() -> str:
    """Return shell commands that set the same variables in a shell before Ray is started from it."""
    variables = dict(os.environ)
    _unify_devices(variables)
    changed = {name: value for name, value in variables.items() if os.environ.get(name) != value}
    lines = [f"export {name}={shlex.quote(value)}" for name, value in changed.items()]
    return "\n".join([*lines, *(f"unset {name}" for name in os.environ.keys() - variables.keys())])


def _unify_devices(variables: MutableMapping[str, str]) -> None:
    if gpu_setup.NVIDIA not in gpu_setup.present_vendors():
        visible_devices.unify(variables)
