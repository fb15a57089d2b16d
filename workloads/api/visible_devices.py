"""The environment variables that choose the GPUs of a process, and how those of AMD's GPUs relate to each other.

ROCm's runtime applies ROCR_VISIBLE_DEVICES first. HIP then counts HIP_VISIBLE_DEVICES, or without it
CUDA_VISIBLE_DEVICES, among the GPUs that are left, and ignores an index that is out of range with all that follow it
(ROCm's documentation, "GPU isolation techniques"; `Device::init` in clr's rocdevice.cpp; `_parse_visible_devices` in
torch/cuda/__init__.py). Ray reads HIP_VISIBLE_DEVICES alone, and refuses ROCR_VISIBLE_DEVICES without it
(ray/_private/accelerators/amd_gpu.py).
"""

from collections.abc import Mapping, MutableMapping

ROCR, HIP, CUDA = "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"


def unify(environment: MutableMapping[str, str]) -> None:
    """Name the GPUs of a machine without NVIDIA's in HIP_VISIBLE_DEVICES, where Ray reads them on import."""
    rocr = environment.pop(ROCR, None)
    chosen = environment.get(HIP, environment.get(CUDA))
    if rocr is not None:
        environment[HIP] = rocr if chosen is None else select(rocr, chosen)
    elif chosen is not None:
        environment[HIP] = chosen
    settle(environment, HIP)


def settle(environment: MutableMapping[str, str], variable: str) -> None:
    """Let the variables of both vendors choose the same GPUs, those of `variable`, which Ray sets for a worker.

    A site may export all GPUs of a node in the other one, and programs differ in which they read first.
    """
    if variable == CUDA:
        environment.pop(ROCR, None)
        environment.pop(HIP, None)
    elif HIP in environment and CUDA in environment:
        environment[CUDA] = environment[HIP]


def select(available: str, chosen: str) -> str:
    """Return the GPUs of `available` whose index or UUID is in `chosen`; all of them if both lists are the same."""
    devices, selected = available.split(","), []
    if sorted(devices) == sorted(chosen.split(",")):
        return available
    for device in filter(None, chosen.split(",")):
        if device.isdigit():
            if int(device) >= len(devices):
                break
            device = devices[int(device)]
        selected.append(device)
    return ",".join(selected)


def restrict_program(environment: Mapping[str, str], devices: str) -> dict[str, str]:
    """Return the variables that leave a program `devices`, in place of those of this worker's `environment`.

    On AMD, where the worker has HIP_VISIBLE_DEVICES, ROCR_VISIBLE_DEVICES chooses them and HIP_VISIBLE_DEVICES is
    0, 1, …: a trainer that resets the latter to its first GPUs still gets these. NVIDIA's driver has only one variable.
    """
    if not devices:
        return {}
    if not environment.get(HIP):
        return {CUDA: devices} if environment.get(CUDA) else {}
    numbers = ",".join(map(str, range(len(devices.split(",")))))
    rocr = select(environment[ROCR], devices) if environment.get(ROCR) else devices
    return {ROCR: rocr, HIP: numbers} | ({CUDA: numbers} if CUDA in environment else {})
