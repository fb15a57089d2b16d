"""Handle the environment variables that select a process's GPUs. AMD has several such variables; NVIDIA has one.

ROCm's runtime applies ROCR_VISIBLE_DEVICES first. HIP then selects from the remaining GPUs by HIP_VISIBLE_DEVICES, or
by CUDA_VISIBLE_DEVICES if HIP_VISIBLE_DEVICES is not set. HIP ignores an out-of-range index and all indices after it
(ROCm's documentation, "GPU isolation techniques"; `Device::init` in clr's rocdevice.cpp; `_parse_visible_devices` in
torch/cuda/__init__.py). Ray reads only HIP_VISIBLE_DEVICES, and rejects ROCR_VISIBLE_DEVICES without
HIP_VISIBLE_DEVICES (ray/_private/accelerators/amd_gpu.py).
"""

from collections.abc import Mapping, MutableMapping

ROCR, HIP, CUDA = "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"


def unify(environment: MutableMapping[str, str]) -> None:
    """On a machine without NVIDIA GPUs, set HIP_VISIBLE_DEVICES, which Ray reads on import."""
    rocr = environment.pop(ROCR, None)
    chosen = environment.get(HIP, environment.get(CUDA))
    if rocr is not None:
        environment[HIP] = rocr if chosen is None else select(rocr, chosen)
    elif chosen is not None:
        environment[HIP] = chosen
    settle(environment, HIP)


def settle(environment: MutableMapping[str, str], variable: str) -> None:
    """Make the variables of both vendors select the GPUs in `variable`, which Ray sets for a worker. A site may list
    all GPUs of a node in the other variable, and programs differ in which variable they read first."""
    if variable == CUDA:
        environment.pop(ROCR, None)
        environment.pop(HIP, None)
    elif HIP in environment and CUDA in environment:
        environment[CUDA] = environment[HIP]


def select(available: str, chosen: str) -> str:
    """Return the GPUs in `available` that `chosen` selects by index or UUID; all if the lists have the same items."""
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
    """Return variables that restrict a program to `devices` and replace those in this worker's `environment`.

    On AMD, Ray sets HIP_VISIBLE_DEVICES for a worker. Set ROCR_VISIBLE_DEVICES to the program's GPUs, and
    HIP_VISIBLE_DEVICES to 0, 1, …. A trainer that resets HIP_VISIBLE_DEVICES to its first GPUs keeps the same GPUs.
    """
    if not devices:
        return {}
    if not environment.get(HIP):
        return {CUDA: devices} if environment.get(CUDA) else {}
    numbers = ",".join(map(str, range(len(devices.split(",")))))
    rocr = select(environment[ROCR], devices) if environment.get(ROCR) else devices
    return {ROCR: rocr, HIP: numbers} | ({CUDA: numbers} if CUDA in environment else {})
