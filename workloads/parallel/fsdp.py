"""FSDP of a stage in torchtitan's units: the embedding, every block, and the last norm with the head.

torchtitan 0.2.2 wraps them so (apply_fsdp in torchtitan/models/llama3/infra/parallelize.py). A unit is gathered before
it runs, while the one before it computes. As a single unit, embedding and head would be gathered before the first block
and reduced after the last backward pass, beside no computation.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from workloads.parallel.stage import Stage
from workloads.precision.layers import gathers_fp8


def shard_stage(stage: Stage, mesh: DeviceMesh, dtype: torch.dtype, *, reshard_after_forward: bool) -> None:
    """Wrap the units of a stage, whose weights are gathered in `dtype` and whose gradients are reduced in their own.

    The head stays gathered after the forward pass, since the backward pass begins with it. If the head's matrix is the
    embedding, both and the norm are in the unit of the whole stage, which stays gathered too.
    """
    state_dtype = next(stage.parameters()).dtype
    # Tensors that a block takes beside its input, such as the rotary embedding's in fp32, are not cast.
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=state_dtype, cast_forward_inputs=False)
    if stage.embedding is not None and not stage.shape.tied:
        fully_shard(stage.embedding, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    for block in stage.blocks.values():
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    if stage.head is not None and not stage.shape.tied:
        fully_shard(stage.head, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    fully_shard(stage, mesh=mesh, mp_policy=policy, reshard_after_forward=False)


def set_gradient_sync(stages: list[Stage], *, is_last_microbatch: bool, reshard_after_forward: bool) -> None:
    """Set what FSDP communicates in the coming backward pass.

    Gradients are averaged over copies in the last micro-batch of a step only. Without `reshard_after_forward` they are
    also reduce-scattered only there, and weights stay gathered until then.
    """
    for stage in stages:
        if isinstance(stage, FSDPModule):
            stage.set_requires_all_reduce(is_last_microbatch)
            if not reshard_after_forward:
                stage.set_requires_gradient_sync(is_last_microbatch)
                stage.set_reshard_after_backward(is_last_microbatch)


def precompute_fp8_scales(stage: Stage) -> None:
    """Compute the scales of all weights that are gathered in fp8 at once, not one by one as they are gathered."""
    if any(gathers_fp8(module) for module in stage.modules()):
        from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

        precompute_float8_dynamic_scale_for_fsdp(stage)


def gathered_dtype(module: nn.Module) -> torch.dtype | None:
    """Return the data type in which FSDP gathers the module's weights; None without FSDP."""
    policy = _policy(module)
    return policy.param_dtype if policy else None


def reduction_dtype(module: nn.Module) -> torch.dtype | None:
    """Return the data type in which FSDP reduces and accumulates the module's gradients; None without FSDP."""
    policy = _policy(module)
    return policy.reduce_dtype if policy else None


def _policy(module: nn.Module) -> MixedPrecisionPolicy | None:
    # PyTorch has no public way to read it back (torch 2.11 to 2.13).
    return fully_shard.state(module)._mp_policy if isinstance(module, FSDPModule) else None  # type: ignore[attr-defined]
