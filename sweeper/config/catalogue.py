"""The GPU catalog: one YAML file per GPU model, used to recognize GPUs even if they are partitioned.

An AMD Instinct GPU may be divided into several devices, which the driver lists as separate GPUs. A partition mode such
as CPX/NPS4 sets the number of devices (SPX: one; CPX: one per die) and how their memory is interleaved.
"""

import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from sweeper.config.resolution import CONF
from sweeper.config.schema import Hardware
from workloads.api.errors import UserInputError, first_line
from workloads.api.gpus import GpuIdentity
from workloads.api.validation import build

# PyYAML's C loader, if available, reads the thirty files 0.1 s faster than OmegaConf's Python loader.
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
UNDIVIDED = "SPX/NPS1"
# The field and unit for each kind of value; the kinds are the keys of `sources`.
FIGURES = {
    "peaks": ("dense_peak_tflops", "TFLOP/s"),
    "memory": ("memory_gib", "GiB"),
    "bandwidth": ("bandwidth_tb_s", "TB/s"),
    "power": ("power_w", "W"),
    "price": ("price_per_hour", "USD an hour"),
}
DEVICES_PER_GPU = {"SPX": 1, "DPX": 2, "TPX": 3, "QPX": 4}
MODES = re.compile(r"([SDTQC]PX)/NPS\d")

_config_dirs: tuple[Path, ...] = ()


def use_config_dir(folder: str | Path | None) -> None:
    """Add the GPUs from `hardware/` in the user's configuration folder, replacing the GPUs added by an earlier call."""
    global _config_dirs
    if folder is None and not _config_dirs:
        return
    _config_dirs = () if folder is None else (Path(folder).expanduser().resolve(),)
    for cached in (catalogue, find_hardware, _device_ids):
        cached.cache_clear()


@cache
def catalogue() -> dict[str, Hardware]:
    """Return all GPU entries by name. Raises UserInputError if one of the user's files is invalid."""
    entries: dict[str, Hardware] = {}
    files: dict[str, dict[str, Any]] = {}
    for path in [path for folder in (CONF, *_config_dirs) for path in sorted((folder / "hardware").glob("*.yaml"))]:
        if path.stem in files:  # as in Hydra, our file wins over a user's file with the same name
            continue
        try:
            values = yaml.load(path.read_text(), Loader=LOADER)
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise UserInputError(f"{path}: cannot be read ({first_line(error)})") from error
        if not isinstance(values, dict):
            raise UserInputError(f"{path}: must be a mapping: key: value")
        merged: dict[str, Any] = {}
        for base in values.pop("defaults", ()):
            merged |= files.get(str(base), {}) | {"price_per_hour": None}  # GPUs that share a base differ in price
        files[path.stem] = merged = merged | {str(key): value for key, value in values.items()}
        entry = build(Hardware, merged, f"{path.name if path.is_relative_to(CONF) else path}: ")
        if entry.kind == "gpu" and entry.name != "auto":
            entries.setdefault(entry.name, entry)
    return entries


@cache
def find_hardware(device_name: str) -> Hardware | None:
    """Look up a GPU by the driver's or Ray's name. If the name includes partition modes, return a partition's entry."""
    name, _, partition = device_name.rpartition(" ")
    if not MODES.fullmatch(partition):
        name, partition = device_name, ""
    for entry in catalogue().values():
        if name in entry.accelerators or _has_name(entry, name):
            return divide(replace(entry, partition=partition)) if partition else entry
    return None


def list_figures(hardware: Hardware) -> list[tuple[str, str, str]]:
    """Return a row for each kind of value in a GPU's entry: the kind, the values with a unit, and the source."""
    rows = []
    for kind, (name, unit) in FIGURES.items():
        if value := getattr(hardware, name):
            peaks = [f"{dtype} {peak:g}" for dtype, peak in value.items()] if kind == "peaks" else [f"{value:g}"]
            source = hardware.sources.get(kind) or hardware.source or "no source"
            rows.append((kind, f"{', '.join(peaks)} {unit}", source))
    return rows


def is_kind(gpu: GpuIdentity, label: str | None, hardware: Hardware) -> bool:
    """Return whether a GPU is of this kind, judging by its PCI id, then its name, then Ray's label. Ray derives an AMD
    GPU's label from the id, which AMD SMI may report even if it reports no name. Ray's labels for NVIDIA GPUs are
    ignored because they omit the form factor, which affects the peaks."""
    device_id = (gpu.device_id or "").lower().removeprefix("0x")
    if device_id in hardware.device_ids:
        return True
    if device_id in _device_ids():  # the id belongs to another kind
        return False
    if find_hardware(gpu.name) or _has_name(hardware, gpu.name):
        return _has_name(hardware, gpu.name)
    return gpu.vendor == "amd" and label in hardware.accelerators


@cache
def _device_ids() -> frozenset[str]:
    return frozenset(device_id for entry in catalogue().values() for device_id in entry.device_ids)


def _has_name(hardware: Hardware, device_name: str) -> bool:
    return any(re.search(pattern, device_name) for pattern in hardware.device_names)


def partition_of(gpu: GpuIdentity) -> str | None:
    """Return a GPU's partition modes, or None if the GPU is undivided or reports none (as virtual functions do)."""
    modes = f"{gpu.compute_partition or 'SPX'}/{gpu.memory_partition or 'NPS1'}"
    return None if modes == UNDIVIDED else modes


def check_partition(hardware: Hardware) -> None:
    """Raise UserInputError if the configuration's partition modes do not exist on these GPUs."""
    if hardware.partition is None:
        return
    if not MODES.fullmatch(hardware.partition):
        raise UserInputError(f"hardware.partition={hardware.partition}: must be such as {UNDIVIDED} or CPX/NPS4")
    if hardware.dies is None:
        raise UserInputError(f"hardware.partition={hardware.partition}: {hardware.name} has no known partitions")


def devices_per_gpu(hardware: Hardware) -> int:
    """Return the number of devices into which the partition mode divides a GPU, or 1 if that number is unknown."""
    mode, *_ = (hardware.partition or UNDIVIDED).split("/")
    return DEVICES_PER_GPU.get(mode, hardware.dies or 1)


def divide(hardware: Hardware, units: int | None = None, memory_gib: float | None = None) -> Hardware:
    """Return the hardware entry for one device of a GPU in its partition mode.

    Each device gets an equal part of the matrix units, the memory, the memory bandwidth and the links. The driver also
    divides the memory evenly (amdgpu_amdkfd_xcp_memory_size in Linux). AMD SMI, however, may report for each device
    the memory of the whole GPU or of the group in which memory is interleaved (ROCm/ROCm#4750).

    `units` and `memory_gib` are the driver's values for one device. Fewer units than expected imply an unreported
    partition mode."""
    total_units = hardware.compute_units or 0
    known = units if units and total_units else None
    devices = max(devices_per_gpu(hardware), round(total_units / known) if known else 1)
    share = min(1 / devices, known / total_units) if known else 1 / devices
    memory = [gib for gib in (hardware.memory_gib and hardware.memory_gib / devices, memory_gib) if gib]
    return replace(
        hardware,
        dense_peak_tflops={dtype: share * peak for dtype, peak in hardware.dense_peak_tflops.items()},
        memory_gib=(min(memory) if devices > 1 else memory[0]) if memory else None,
        bandwidth_tb_s=hardware.bandwidth_tb_s and hardware.bandwidth_tb_s / devices,
        link_gb_s=hardware.link_gb_s and hardware.link_gb_s / devices,
        # Devices of one GPU share its links, and no link joins two devices.
        link_peers=hardware.link_peers if devices == 1 else None,
    )
