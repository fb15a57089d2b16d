"""What has to hold in this process before Ray is imported, which reads its visible GPUs on import."""

from __future__ import annotations

import os
import shlex
from collections.abc import MutableMapping

from sweeper.common.errors import UserInputError
from workloads.api import gpu_setup, visible_devices


def prepare() -> None:
    """Name this process's GPUs where Ray reads them.

    Raises:
        UserInputError: an installed package makes Ray's import fail.
    """
    _unify_devices(os.environ)
    if problem := gpu_setup.find_broken_amdsmi():
        raise UserInputError(str(problem))


def shell_commands() -> str:
    """Return the commands that do the same in a shell, which then starts Ray."""
    variables = dict(os.environ)
    _unify_devices(variables)
    changed = {name: value for name, value in variables.items() if os.environ.get(name) != value}
    lines = [f"export {name}={shlex.quote(value)}" for name, value in changed.items()]
    return "\n".join([*lines, *(f"unset {name}" for name in os.environ.keys() - variables.keys())])


def _unify_devices(variables: MutableMapping[str, str]) -> None:
    if not gpu_setup.has_nvidia_gpus():
        visible_devices.unify(variables)
