"""The device of an import whose file has none: the one that the command names, or the file's name."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from sweeper.commands.ingest.imported import ImportedResult
from sweeper.config.catalogue import catalogue, find_hardware
from sweeper.config.schema import Hardware
from workloads.api.errors import UserInputError, suggest


def check_device(name: str) -> None:
    """Check a device that the command names.

    Raises:
        UserInputError: it is neither in the catalogue nor a driver's name of a GPU that is.
    """
    if get_hardware(name) is None:
        raise UserInputError(f"device={name}: unknown device. {suggest(name, catalogue())}")


def get_hardware(device: str) -> Hardware | None:
    """Return the catalogue's entry for its own name or a driver's name of a GPU; None if it has none."""
    return catalogue().get(device) or (find_hardware(device) if device else None)


def add_device(result: ImportedResult, path: Path, option: str) -> ImportedResult:
    """Return a result that names no device with the command's, else with the one in the file's name, if it has one."""
    if result.device:
        return result
    if option:
        return replace(result, device=option)
    named = find_device_in_name(path)
    notes = (*result.notes, f"the device is taken from the file's name: {named}") if named else result.notes
    return replace(result, device=named, notes=notes)


def find_device_in_name(path: Path) -> str:
    """Return the catalogue's name of a device that is a part of the file's name; empty if none is."""
    name = f"_{re.sub(r'[^a-z0-9]+', '_', path.stem.lower())}_"
    return max((device for device in catalogue() if f"_{device}_" in name), key=len, default="")
