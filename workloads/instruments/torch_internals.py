"""Uses of undocumented parts of PyTorch, except attention kernels (see `workloads.llama.attention_kernels`).

pyproject.toml pins PyTorch to the minor versions in which these uses were tested. Each use has a test in
`tests/workloads/instruments/test_torch_internals.py`, which explains what to do when a later version breaks the use.
"""

from functools import partial
from typing import Any

import torch
import torch.distributed._functional_collectives as collectives
from torch import Tensor, nn
from torch.nn.attention import SDPBackend


def choose_sdpa_backend(q: Tensor, k: Tensor, v: Tensor) -> SDPBackend:
    """Return the kernel that causal scaled_dot_product_attention chooses. Raises RuntimeError if none fits."""
    return SDPBackend(torch._fused_sdp_choice(q, k, v, None, 0.0, True, enable_gqa=True))


def register_flash4(module: str) -> Any:
    """Replace PyTorch's flash kernel with a module's functions _flash_attn_fwd and _flash_attn_bwd. The public switch
    accepts only flash-attn-4's own module, and its functions return more values than PyTorch unpacks."""
    from torch.nn.attention import _fa4

    return _fa4.register_flash_attention_fa4(module)


def recorded_events(profiler: Any) -> list[Any]:
    """Return the events that a `torch.profiler.profile` recorded, without building the tree that its `events` builds.

    Building the tree takes 60 µs per event: 15 s for a step of 512 block passes, which is longer than the step itself.
    """
    return list(profiler.profiler.kineto_results.events())


def delay_gpu(cycles: int) -> None:
    """Queue a kernel that idles for `cycles` cycles, so that the host can run ahead of the GPU."""
    torch.cuda._sleep(cycles)


def forget_process_groups() -> None:
    """Clear DTensor's cache of sharding decisions, which holds earlier trials' process groups."""
    from torch.distributed.tensor import debug

    if hasattr(debug, "_clear_sharding_prop_cache"):
        debug._clear_sharding_prop_cache()


def input_style(module: nn.Module) -> str:
    """Return the class name of the parallel style that prepares a module's inputs, found by its hook, or ""."""
    for hook in module._forward_pre_hooks.values():
        for cell in getattr(hook, "__closure__", None) or ():
            if isinstance(cell.cell_contents, partial):
                return cell.cell_contents.func.__qualname__.split(".")[0]
    return ""


def compile_error() -> type[Exception]:
    """Return the exception that torch.compile raises for code that it cannot compile, which has no public name."""
    return torch._dynamo.exc.Unsupported


def supports_persistent_tma() -> bool:
    """Return whether Inductor has Triton kernels for GEMMs that use Hopper's tensor memory accelerator."""
    from torch._inductor import config

    return hasattr(config.triton, "enable_persistent_tma_matmul")


# Collectives that autograd differentiates and the compiler traces, by their names since or before torch 2.13.
gather_rows: Any = getattr(collectives, "all_gather_single_autograd", None) or collectives.all_gather_tensor_autograd
gather_numbers: Any = getattr(collectives, "all_gather_single", None) or collectives.all_gather_tensor
scatter_sums: Any = (
    getattr(collectives, "reduce_scatter_single_autograd", None) or collectives.reduce_scatter_tensor_autograd
)
