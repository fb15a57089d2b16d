"""A stand-in for AMD SMI's Python package. It names, types and raises as ROCm/amdsmi documents; no GPU is behind it.

Sources: py-interface/README.md and amdsmi_interface.py of ROCm/amdsmi (units, field names, "N/A"), and the outputs of
`amd-smi static` and `amd-smi metric` of MI300X nodes in public issues. Only what Ray, torch and this project call is
here. The environment variable AMDSMI_STAND_IN selects a scenario from `SCENARIOS`.
"""

import os
import time
from collections import Counter
from enum import IntEnum
from typing import Any

NOT_SUPPORTED, NOT_INITIALIZED = 2, 32  # AMDSMI_STATUS_NOT_SUPPORTED, AMDSMI_STATUS_NOT_INIT
MIB_PER_GPU = 196_592  # of vram_total of an MI300X: 191.98 GiB


class AmdSmiException(Exception):
    pass


class AmdSmiLibraryException(AmdSmiException):
    def __init__(self, err_code: int) -> None:
        super().__init__(f"Error code: {err_code}")
        self.err_code = err_code


class AmdSmiInitFlags(IntEnum):
    INIT_AMD_GPUS = 2


class AmdSmiMemoryType(IntEnum):
    VRAM = 0


class AmdSmiClkType(IntEnum):
    GFX = 0


# By scenario what differs from eight MI300X in SPX and NPS1, each in a machine of two sockets.
SCENARIOS: dict[str, dict[str, Any]] = {
    "mi300x": {},
    # As clouds pass them on: another device id, and no power cap or partition for a guest.
    "mi300x_virtual": {
        "device_id": 0x74B5,
        "market_name": "AMD Instinct MI300X VF",
        "unsupported": {
            "power_cap_info",
            "gpu_compute_partition",
            "gpu_memory_partition",
            "gpu_bad_page_info",
            "energy_count",
        },
    },
    # Each GPU divided into eight, and its memory into four.
    "mi300x_cpx_nps4": {
        "partitions": 8,
        "compute_partition": "CPX",
        "memory_partition": "NPS4",
        "compute_units": 38,
        "memory_mib": MIB_PER_GPU // 4,
    },
    "mi355x": {
        "device_id": 0x75A3,
        "market_name": "AMD Instinct MI355X",
        "architecture": "gfx950",
        "compute_units": 256,
        "memory_mib": 294_896,
        "power_cap_w": 1400,
    },
    # Two dies a package, each a GPU; the counter is the package's.
    "mi250x": {
        "device_id": 0x740C,
        "market_name": "AMD Instinct MI250X",
        "architecture": "gfx90a",
        "compute_units": 110,
    },
    "unknown_model": {"device_id": 0x7FFF, "market_name": "N/A"},
    # Another user's process holds memory of GPU 3.
    "in_use": {"used_mib": {3: 20_480}, "processes": {3: [4242]}},
    "hot": {"growing": {"socket_thm_residency_acc", "ppt_residency_acc"}},
    "one_capped": {"power_caps_w": {5: 600}},
    "errors": {"uncorrected": {2: 3}, "bad_pages": {2: 7}},
    "wearing": {"wearing": 6},  # a GPU whose counters rise with each reading
    # HIP counts the GPUs in another order than AMD SMI.
    "reordered": {"hip_ids": [4, 5, 6, 7, 0, 1, 2, 3]},
    "not_available": {"not_available": True},
    "raising": {"raising": True},
    "no_gpus": {"gpus": 0},
    "no_driver": {"no_driver": True},
}
SCENARIO = os.environ.get("AMDSMI_STAND_IN", "mi300x")
if SCENARIO == "no_library":  # the package on the index without ROCm's library
    raise KeyError("ROCM_PATH")
MACHINE = SCENARIOS[SCENARIO]
COUNTERS = ("ppt_residency_acc", "prochot_residency_acc", "socket_thm_residency_acc")
COUNTERS += ("vr_thm_residency_acc", "hbm_thm_residency_acc")

_initialized = False
_reads = 0
_wear = Counter[tuple[int, str]]()


class _Processor:
    """A GPU, or a partition of one."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.partition = index % MACHINE.get("partitions", 1)
        self.gpu = index // MACHINE.get("partitions", 1)


def amdsmi_init(flag: AmdSmiInitFlags = AmdSmiInitFlags.INIT_AMD_GPUS) -> None:
    global _initialized
    if MACHINE.get("no_driver"):
        raise AmdSmiLibraryException(34)  # AMDSMI_STATUS_DRIVER_NOT_LOADED
    _initialized = True


def amdsmi_shut_down() -> None:
    global _initialized
    _initialized = False


def amdsmi_get_processor_handles() -> list[_Processor]:
    if not _initialized:
        raise AmdSmiLibraryException(NOT_INITIALIZED)
    return [_Processor(index) for index in range(MACHINE.get("gpus", 8) * MACHINE.get("partitions", 1))]


def _check(call: str) -> None:
    if not _initialized:
        raise AmdSmiLibraryException(NOT_INITIALIZED)
    if MACHINE.get("raising") or call in MACHINE.get("unsupported", ()):
        raise AmdSmiLibraryException(NOT_SUPPORTED)


def _reported(fields: dict[str, Any]) -> dict[str, Any]:
    return dict.fromkeys(fields, "N/A") if MACHINE.get("not_available") else fields


def amdsmi_get_gpu_id(gpu: _Processor) -> int:
    _check("gpu_id")
    device_id: int = MACHINE.get("device_id", 0x74A1)
    return device_id


def amdsmi_get_gpu_asic_info(gpu: _Processor) -> dict[str, Any]:
    _check("gpu_asic_info")
    return _reported(
        {
            "market_name": MACHINE.get("market_name", "AMD Instinct MI300X"),
            "vendor_id": "0x1002",
            "vendor_name": "Advanced Micro Devices Inc. [AMD/ATI]",
            "subvendor_id": "0x1002",
            "device_id": hex(MACHINE.get("device_id", 0x74A1)),
            "rev_id": "0x00",
            "asic_serial": f"0x{0xA000 + gpu.gpu:016X}",
            "oam_id": gpu.gpu,
            "num_compute_units": MACHINE.get("compute_units", 304),
            "target_graphics_version": MACHINE.get("architecture", "gfx942"),
        }
    )


def amdsmi_get_gpu_enumeration_info(gpu: _Processor) -> dict[str, Any]:
    _check("gpu_enumeration_info")
    hip_id = MACHINE["hip_ids"][gpu.index] if "hip_ids" in MACHINE else gpu.index
    return _reported({"drm_render": 128 + gpu.index, "drm_card": gpu.index, "hsa_id": 2 + hip_id, "hip_id": hip_id})


def amdsmi_get_gpu_device_bdf(gpu: _Processor) -> str:
    _check("gpu_device_bdf")
    return f"0000:{0x05 + 0x10 * gpu.gpu:02x}:00.{gpu.partition}"


def amdsmi_get_gpu_driver_info(gpu: _Processor) -> dict[str, Any]:
    _check("gpu_driver_info")
    return _reported({"driver_name": "amdgpu", "driver_version": "6.12.12", "driver_date": "2015/01/01 00:00"})


def amdsmi_get_gpu_vbios_info(gpu: _Processor) -> dict[str, Any]:
    _check("gpu_vbios_info")
    return _reported({"name": "AMD MI300X", "part_number": "113-M3000100-103", "version": "022.040.003.043.000001"})


def amdsmi_get_gpu_vram_usage(gpu: _Processor) -> dict[str, Any]:
    _check("gpu_vram_usage")
    used_mib = MACHINE.get("used_mib", {}).get(gpu.gpu, 283)
    return _reported({"vram_total": MACHINE.get("memory_mib", MIB_PER_GPU), "vram_used": used_mib})


def amdsmi_get_gpu_process_list(gpu: _Processor) -> list[dict[str, Any]]:
    _check("gpu_process_list")
    pids = MACHINE.get("processes", {}).get(gpu.gpu, [])
    used_bytes = 20_480 << 20
    return [{"name": "N/A", "pid": pid, "mem": used_bytes, "memory_usage": {"vram_mem": used_bytes}} for pid in pids]


def amdsmi_get_power_cap_info(gpu: _Processor) -> dict[str, Any]:
    _check("power_cap_info")
    default_w = MACHINE.get("power_cap_w", 750)
    cap_w = MACHINE.get("power_caps_w", {}).get(gpu.gpu, default_w)
    watts = {"power_cap": cap_w, "default_power_cap": default_w, "min_power_cap": 0, "max_power_cap": default_w}
    return _reported({**{name: value * 10**6 for name, value in watts.items()}, "dpm_cap": 2100})  # microwatts


def amdsmi_get_energy_count(gpu: _Processor) -> dict[str, Any]:
    """Return a count that, times the resolution, is microjoules. A GPU draws 748 W; the time is that of the call."""
    _check("energy_count")
    resolution_uj = 15.259
    count = int(748e6 * time.perf_counter() / resolution_uj)
    return _reported({"energy_accumulator": count, "counter_resolution": resolution_uj, "timestamp": time.time_ns()})


def amdsmi_get_clock_info(gpu: _Processor, clock_type: AmdSmiClkType) -> dict[str, Any]:
    _check("clock_info")
    return _reported({"clk": 132, "min_clk": 132, "max_clk": 2100, "clk_locked": 0, "clk_deep_sleep": 0})


def amdsmi_get_gpu_total_ecc_count(gpu: _Processor) -> dict[str, Any]:
    _check("gpu_total_ecc_count")
    uncorrected = MACHINE.get("uncorrected", {}).get(gpu.gpu, 0)
    corrected = _count_wear(gpu, "corrected")
    return _reported({"correctable_count": corrected, "uncorrectable_count": uncorrected, "deferred_count": 0})


def amdsmi_get_pcie_info(gpu: _Processor) -> dict[str, Any]:
    _check("pcie_info")
    metric = {"pcie_width": 16, "pcie_replay_count": _count_wear(gpu, "replays")}
    return {"pcie_static": {"max_pcie_width": 16}, "pcie_metric": metric}


def _count_wear(gpu: _Processor, counter: str) -> int:
    _wear[gpu.index, counter] += gpu.index == MACHINE.get("wearing")
    return _wear[gpu.index, counter]


def amdsmi_get_gpu_bad_page_info(gpu: _Processor) -> list[dict[str, Any]]:
    _check("gpu_bad_page_info")
    count = MACHINE.get("bad_pages", {}).get(gpu.gpu, 0)
    return [{"value": number, "page_address": 4096 * number, "page_size": 4096, "status": 0} for number in range(count)]


def amdsmi_topo_get_numa_node_number(gpu: _Processor) -> int:
    _check("topo_get_numa_node_number")
    return gpu.gpu // 4


def amdsmi_get_gpu_compute_partition(gpu: _Processor) -> str:
    _check("gpu_compute_partition")
    return "N/A" if MACHINE.get("not_available") else str(MACHINE.get("compute_partition", "SPX"))


def amdsmi_get_gpu_memory_partition(gpu: _Processor) -> str:
    _check("gpu_memory_partition")
    return "N/A" if MACHINE.get("not_available") else str(MACHINE.get("memory_partition", "NPS1"))


def amdsmi_get_gpu_metrics_info(gpu: _Processor) -> dict[str, Any]:
    """Return the table of metrics: on an MI300X one clock for each of eight dies, and residencies that accumulate."""
    global _reads
    _check("gpu_metrics_info")
    _reads += 1
    growing = MACHINE.get("growing", {"ppt_residency_acc"})
    return _reported(
        {
            "temperature_edge": "N/A",
            "temperature_hotspot": 61,
            "average_socket_power": "N/A",
            "current_socket_power": 748,
            "current_gfxclk": 1300,
            "current_gfxclks": [1300, 1310, 1290, 1300, 1300, 1300, 1300, 1300],
            "current_uclk": 1300,
            "throttle_status": "N/A",
            "indep_throttle_status": "N/A",
            "accumulation_counter": 1000 + 10 * _reads,
            **{name: 5 * _reads if name in growing else 17 for name in COUNTERS},
        }
    )
