"""Clipping of gradients by their norm over all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

MAX_NORM = 1.0  # torchtitan's training.max_norm and Megatron's --clip-grad


def clip_gradients(parameters: Sequence[nn.Parameter], pp_mesh: DeviceMesh, max_norm: float = MAX_NORM) -> Tensor:
    """Scale the gradients of this rank's stages to a global norm of at most `max_norm`. Returns the norm before.

    PyTorch's norm of distributed tensors covers the ranks that share a stage. Those of the stages are summed here, as
    in torchtitan/distributed/utils.py, clip_grad_norm_.

    A collective operation: all ranks have to call it.
    """
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    if pp_mesh.size() > 1:
        square = norm.square()
        dist.all_reduce(square, group=pp_mesh.get_group())
        norm = square.sqrt()
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm
