"""Set up a process before it uses its GPU: folders for compiled kernels, and PyTorch's allocator."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

from workloads.api.contract import Infeasible, Scalar
from workloads.api.notices import notify

GIB = 2**30
# PyTorch reads allocator settings from the first of these variables that is set.
VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def cache_folder(name: str) -> Path | None:
    """Return our folder in the user's cache folder (XDG_CACHE_HOME or ~/.cache), or None if it cannot be created."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gpu-sweeper" / name
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # not writable, or no home folder
        return None
    return folder


def keep_compiled_kernels() -> None:
    """Make PyTorch's compiler, Triton and FlashAttention 4 keep their kernels in the user's cache folder.

    By default, PyTorch's compiler and Triton keep kernels in /tmp, which many clusters empty between jobs, and
    FlashAttention keeps none. A folder set by the user takes precedence. Nothing changes if the cache folder is not
    writable. Call this before anything is compiled, because FlashAttention reads its settings at import.
    """
    folder = cache_folder("kernels")
    if folder is None:
        return
    # During its import, torch writes its default, a folder in /tmp, to the environment.
    temporary = Path(tempfile.gettempdir())
    if Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR", temporary / "unset")).parent == temporary:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")
    os.environ.setdefault("TRITON_CACHE_DIR", str(folder / "triton"))
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(folder / "flash_attention"))


def supports_expandable_segments(device: torch.device) -> bool:
    """Return whether memory segments can grow, as they can on CUDA and, since version 7.0, on ROCm.

    CUDAAllocatorConfig.h requires ROCM_VERSION 70000 (pytorch#177974, pytorch#179930). Older versions of PyTorch accept
    the setting with a warning and ignore it; `describe_segments` reports whether the setting took effect.
    """
    return device.type != "cpu" and (not torch.version.hip or int(torch.version.hip.partition(".")[0]) >= 7)


@cache  # once per process: for a later trial, CUDA is initialized, with this setting
def enable_expandable_segments(device: torch.device) -> None:
    """Let segments grow if the device and the environment allow it. Print a notice if it is too late.

    PyTorch reads allocator settings once, when it initializes CUDA (CUDAAllocatorConfig::instance), so a process must
    call this before it uses its GPU. The environment is then restored, because a trial records the environment that it
    was started with.
    """
    # PyTorch uses only the first variable that is set, so this variable repeats the existing settings.
    settings = next((value for name in VARIABLES if (value := os.environ.get(name))), "")
    if "expandable_segments" in settings or not supports_expandable_segments(device):
        return
    if torch.cuda.is_initialized():
        notify("expandable_segments is off: this process used its GPU before, which may cost memory")
        return
    original = os.environ.get(VARIABLES[0])
    os.environ[VARIABLES[0]] = ",".join(filter(None, (settings, "expandable_segments:True")))
    try:
        torch.empty(1, device=device)
    finally:
        if original is None:
            del os.environ[VARIABLES[0]]
        else:
            os.environ[VARIABLES[0]] = original


def describe_segments(device: torch.device) -> dict[str, Scalar]:
    """Return whether the device's memory segments can grow, as the allocator reports; empty on a CPU."""
    if device.type == "cpu":
        return {}
    segments = torch.cuda.memory_snapshot()
    return {"expandable_segments": any(segment.get("is_expandable", False) for segment in segments)}


@contextmanager
def device_memory_limit(device: torch.device, device_gib: float) -> Iterator[None]:
    """Limit a GPU's allocator to `device_gib`. Raises Infeasible if less than that is free."""
    if device.type == "cpu":
        yield
        return
    torch.empty(1, device=device)  # creates the context
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    usable_gib = (free_bytes + torch.cuda.memory_reserved(device)) / GIB
    if device_gib > usable_gib:
        free = f"{usable_gib:.1f} GiB that are free on this GPU of {total_bytes / GIB:.1f} GiB"
        raise Infeasible(f"device_gib={device_gib:g} exceeds the {free}")
    outer = torch.cuda.get_per_process_memory_fraction(device)
    torch.cuda.set_per_process_memory_fraction(device_gib * GIB / total_bytes, device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(outer, device)
