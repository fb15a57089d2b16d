"""The folder that keeps compiled kernels and measured rates between trials, processes and sweeps of one machine."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def cache_folder(name: str) -> Path | None:
    """Return a folder of ours in the user's cache folder (XDG_CACHE_HOME, or ~/.cache); None if it cannot be made."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gpu-sweeper" / name
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # not writable, or no home folder
        return None
    return folder


def keep_compiled_kernels() -> None:
    """Let PyTorch's compiler, Triton and FlashAttention 4 keep their kernels in one folder.

    It is `gpu-sweeper/kernels` in the user's cache folder. By default the first two keep theirs in /tmp, which many
    clusters empty between jobs, and FlashAttention keeps none. A folder that the user has set remains, and where that
    folder cannot be written nothing changes.

    Call it before anything is compiled: FlashAttention reads its settings at import.
    """
    folder = cache_folder("kernels")
    if folder is None:
        return
    # torch writes its default, a folder in /tmp, into the environment while it is imported.
    temporary = Path(tempfile.gettempdir())
    if Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR", temporary / "unset")).parent == temporary:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")
    os.environ.setdefault("TRITON_CACHE_DIR", str(folder / "triton"))
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(folder / "flash_attention"))
