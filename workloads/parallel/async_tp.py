"""Asynchronous tensor parallelism: collectives in parts, beside the parts of the matrix products that they belong to.

PyTorch's compiler fuses an all-gather with the products after it and a product with the reduce-scatter after it, over
memory that all ranks of the group map (symmetric memory; torchtitan/distributed/compile.py enables it in the same way).
"""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch
import torch.distributed as dist

GROUPS_PER_TRIAL = 1000  # more than a layout creates


def separate_group_names(sequence_number: int) -> None:
    """Give the groups that are created from now on names that no other trial of this process has.

    Symmetric memory keeps what it knows of a group by its name for the life of the process, and names count from 0
    again after `destroy_process_group`. All ranks have to call it with the same number.
    """
    dist.distributed_c10d._world.group_count += GROUPS_PER_TRIAL * sequence_number


def enable_async_tp(group: dist.ProcessGroup) -> dict[str, Any]:
    """Enable symmetric memory in a tensor parallel group. Returns the options with which blocks are compiled."""
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    if torch.cuda.device_count() == 1:
        # A worker sees its own GPU alone, so all ranks have device 0, which counts as the same one without this
        # (validate_rendezvous_requests in CUDASymmetricMemory.cu).
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    with warnings.catch_warnings():  # deprecated, but the compiler still reads what it sets (2.13)
        warnings.simplefilter("ignore", FutureWarning)
        enable_symm_mem_for_group(group.group_name)
    return {"_micro_pipeline_tp": True}


def count_fused_calls(communication: dict[str, float]) -> float:
    """Return how many fused products and collectives a profiled step has had, of its communication metrics."""
    return sum(count for name, count in communication.items() if name.startswith("calls_fused_"))
