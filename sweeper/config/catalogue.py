"""The catalogue of GPUs in `conf/hardware/`, and recognizing a GPU by what its driver and Ray report."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache

import yaml

from sweeper.config import partitions
from sweeper.config.resolution import CONF
from sweeper.config.schema import Hardware
from sweeper.config.validation import build
from workloads.api.gpus import GpuIdentity

# In C where PyYAML has it: thirty files take 0.1 s less than by OmegaConf, which reads them in Python.
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@cache
def catalogue() -> dict[str, Hardware]:
    """Return every kind of GPU in `conf/hardware/` by its name."""
    entries = {}
    for path in sorted((CONF / "hardware").glob("*.yaml")):
        values = yaml.load(path.read_text(), Loader=LOADER)
        assert isinstance(values, dict)
        entry = build(Hardware, {str(key): value for key, value in values.items()}, f"{path.name}: ")
        if entry.kind == "gpu" and entry.name != "auto":
            entries[entry.name] = entry
    return entries


@cache
def find_hardware(device_name: str) -> Hardware | None:
    """Return the catalogue's entry for a driver's or Ray's name of a GPU; None if it has none.

    A name with partition modes gives what one of the devices has.
    """
    name, partition = partitions.split_model(device_name)
    for entry in catalogue().values():
        if name in entry.accelerators or _has_name(entry, name):
            return partitions.divide(replace(entry, partition=partition)) if partition else entry
    return None


def is_kind(gpu: GpuIdentity, label: str | None, hardware: Hardware) -> bool:
    """Return whether a GPU is of this kind.

    Virtual functions have names and ids of their own. Ray reads its label of an AMD GPU from the id, which AMD SMI may
    report where it reports no name; its labels of NVIDIA's GPUs leave out the form, on which the peaks depend.
    """
    device_id = (gpu.device_id or "").lower().removeprefix("0x")
    if device_id in hardware.device_ids:
        return True
    if device_id in _device_ids():  # another kind's
        return False
    if find_hardware(gpu.name) or _has_name(hardware, gpu.name):
        return _has_name(hardware, gpu.name)
    return gpu.vendor == "amd" and label in hardware.accelerators


@cache
def _device_ids() -> frozenset[str]:
    return frozenset(device_id for entry in catalogue().values() for device_id in entry.device_ids)


def _has_name(hardware: Hardware, device_name: str) -> bool:
    return any(re.search(pattern, device_name) for pattern in hardware.device_names)
