"""Instinct GPUs that are divided into several devices, each of which the driver shows as a GPU.

The compute mode says into how many: SPX is one, CPX one for each die. The memory mode (NPS1, NPS4) says over what their
memory is interleaved. The modes are written together, such as CPX/NPS4.
"""

from __future__ import annotations

import re
from dataclasses import replace

from sweeper.config.schema import Hardware
from workloads.api.errors import UserInputError
from workloads.api.gpus import GpuIdentity

UNDIVIDED = "SPX/NPS1"
DEVICES_PER_GPU = {"SPX": 1, "DPX": 2, "TPX": 3, "QPX": 4}
MODES = re.compile(r"([SDTQC]PX)/NPS\d")


def partition_of(gpu: GpuIdentity) -> str | None:
    """Return the partition modes of a GPU; None if it is not divided, or reports none, as virtual functions do."""
    modes = f"{gpu.compute_partition or 'SPX'}/{gpu.memory_partition or 'NPS1'}"
    return None if modes == UNDIVIDED else modes


def split_model(model: str) -> tuple[str, str | None]:
    """Return a model's name without its partition modes, and these: `AMD Instinct MI300X CPX/NPS4` has them."""
    name, _, modes = model.rpartition(" ")
    return (name, modes) if MODES.fullmatch(modes) else (model, None)


def check_partition(hardware: Hardware) -> None:
    """Check the partition modes that a configuration asks for.

    Raises:
        UserInputError: there are no such modes, or no partitions of this kind of GPU are known.
    """
    if hardware.partition is None:
        return
    if not MODES.fullmatch(hardware.partition):
        raise UserInputError(f"hardware.partition={hardware.partition}: must be such as {UNDIVIDED} or CPX/NPS4")
    if hardware.dies is None:
        raise UserInputError(f"hardware.partition={hardware.partition}: {hardware.name} has no known partitions")


def devices_per_gpu(hardware: Hardware) -> int:
    """Return into how many devices the partition mode divides a GPU; 1 where that is not known."""
    mode, *_ = (hardware.partition or UNDIVIDED).split("/")
    return DEVICES_PER_GPU.get(mode, hardware.dies or 1)


def divide(hardware: Hardware, units: int | None = None, memory_gib: float | None = None) -> Hardware:
    """Return what one device of a GPU has in its partition mode.

    Each has an equal part of the matrix units, of the memory and its bandwidth, and of the links. The driver divides
    the memory evenly too (amdgpu_amdkfd_xcp_memory_size in Linux), but AMD SMI may report for each device all memory
    of the GPU, or of the group that it is interleaved in (ROCm/ROCm#4750).

    Args:
        hardware: a whole GPU, with the partition mode.
        units: the compute units that the driver reports of a device, fewer also where it does not tell the mode.
        memory_gib: the memory that it reports of a device.
    """
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
