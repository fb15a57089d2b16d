"""What can be said of this machine without torch: its processor and its GPUs' names."""

from __future__ import annotations

import platform


def cpu_name() -> str:
    """The processor's name as the kernel gives it, else its architecture."""
    try:
        with open("/proc/cpuinfo") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def gpu_names() -> tuple[str, ...]:
    """The NVIDIA driver's name of each GPU, in its order; empty where there is no such driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        return tuple(pynvml.nvmlDeviceGetName(handle) for handle in handles)
    finally:
        pynvml.nvmlShutdown()
