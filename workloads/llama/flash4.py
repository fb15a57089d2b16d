"""FlashAttention 4 in the place of PyTorch's own flash kernel."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch.nn import attention

from workloads.api.contract import Infeasible
from workloads.instruments import torch_internals


def can_replace_flash() -> bool:
    """Return whether this PyTorch has the switch that replaces its flash kernel."""
    return not torch.version.hip and hasattr(attention, "activate_flash_attention_impl")


@contextmanager
def flash4_as_flash() -> Iterator[None]:
    """Let PyTorch's flash kernel be FlashAttention 4 until the block ends, by the public switch of torch 2.11.

    Raises:
        Infeasible: this PyTorch lacks the switch, or the package is not installed.
    """
    if not can_replace_flash():
        raise Infeasible(f"kernel=flash4 needs torch 2.11 or later for CUDA, this is {torch.__version__}")
    register = partial(torch_internals.register_flash4, "workloads.llama.flash4_functions")
    attention.register_flash_attention_impl("FA4", register_fn=register)
    try:
        attention.activate_flash_attention_impl("FA4")
    except (ImportError, OSError, RuntimeError) as error:
        raise Infeasible(f"kernel=flash4: pip install 'gpu-sweeper[flash4]' ({str(error).splitlines()[0]})") from error
    try:
        yield
    finally:
        attention.restore_flash_attention_impl()
