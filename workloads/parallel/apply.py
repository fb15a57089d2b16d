"""Laying a model out over ranks, in the one order that works.

1. Which layers this rank has (pipeline): only those are ever built, on no device yet.
2. Context: blocks are given an attention that knows its group.
3. Tensor: every block's matrices are divided before anything wraps the block, since the plan names them.
4. Checkpointing wraps blocks, so that what is divided is also what is computed again. Blocks whose backward pass is
   written out do it themselves.
5. Compiling sees a whole block, selective checkpointing included; what is computed again whole is compiled inside. Of
   those written out, what is between the products is compiled.
6. FSDP comes last: it takes what it finds, divided or not, and gathers it just before a block runs.
7. Memory is allocated, each rank for what it keeps, and filled from weights that do not depend on the layout.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from workloads.device import architecture
from workloads.llama.attention import fastest_kernel
from workloads.llama.block import BlockMath
from workloads.llama.model import Block, rope_table
from workloads.llama.shapes import LlamaShape
from workloads.parallel.context import ContextAttention, positions
from workloads.parallel.layout import Layout, is_written, stage_layers
from workloads.parallel.stage import Initial, Kept, Stage, WrittenBlock, each_parameter
from workloads.precision.layers import apply_recipe

# A block's inputs and outputs are divided along the sequence, what is inside of it along heads and width.
BLOCK_PLAN = {
    "attention_norm": SequenceParallel(use_local_output=True),
    "qkv": ColwiseParallel(input_layouts=Shard(1)),
    "output": RowwiseParallel(output_layouts=Shard(1)),
    "mlp_norm": SequenceParallel(use_local_output=True),
    "gate_up": ColwiseParallel(input_layouts=Shard(1)),
    "down": RowwiseParallel(output_layouts=Shard(1)),
}
ENDS_PLAN = {
    "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "norm": SequenceParallel(use_local_output=True),
    "lm_head": ColwiseParallel(),
}


@dataclass(frozen=True)
class Groups:
    """Who talks to whom. `mesh` has the dimensions pipeline, replicate, shard (context within it) and tensor."""

    mesh: DeviceMesh
    context: dist.ProcessGroup | None

    @property
    def tensor(self) -> DeviceMesh | None:
        return self.mesh["tensor"] if self.mesh["tensor"].size() > 1 else None

    @property
    def data(self) -> DeviceMesh | None:
        """What gradients are averaged over."""
        if self.mesh["replicate"].size() > 1:
            return self.mesh["replicate", "shard"]
        return self.mesh["shard"] if self.mesh["shard"].size() > 1 else None


def groups_of(layout: Layout, device_type: str) -> Groups:
    """Make them; all ranks have to come here together."""
    sizes = (layout.pipeline, layout.replicate, layout.shard * layout.context, layout.tensor)
    mesh = init_device_mesh(device_type, sizes, mesh_dim_names=("pipeline", "replicate", "shard", "tensor"))
    context = None
    if layout.context > 1:
        ranks = mesh.mesh.unflatten(2, (layout.shard, layout.context)).movedim(3, -1).reshape(-1, layout.context)
        context, _ = dist.new_subgroups_by_enumeration(ranks.tolist())
    return Groups(mesh, context)


def stages_of(
    shape: LlamaShape,
    layout: Layout,
    groups: Groups,
    sequence_length: int,
    device: torch.device,
    dtype: torch.dtype,
    initial: Initial,
    *,
    compiled: bool,
    recipe: str = "",
) -> list[Stage]:
    """This rank's stages, ready to train: stage number n is on pipeline rank n modulo the degree. `recipe` is what the
    products of blocks are in where it is not `dtype`. Raises Infeasible where sizes do not fit it."""
    rank = groups.mesh["pipeline"].get_local_rank()
    rope = rope_table(shape, sequence_length, device)
    if groups.context is not None:
        rope = rope[:, positions(sequence_length, layout.context, dist.get_rank(groups.context)).to(device)]
    block: Callable[[], Block] = partial(Block, shape)
    written = is_written(layout, recipe)
    if written:
        kernel = fastest_kernel(shape.heads, shape.kv_heads, shape.head_size, sequence_length, device, dtype)
        block = partial(WrittenBlock, BlockMath(shape, kernel, compiled=compiled), layout.checkpointing)
    each = stage_layers(shape.layers, layout.total_stages)
    stages = []
    for layers in each[rank :: layout.pipeline]:
        with torch.device("meta"):
            stage = Stage(shape, layers, rope, block).to(dtype)
        if recipe:
            tokens = layout.micro_batch * sequence_length // layout.context
            apply_recipe(stage.blocks, recipe, architecture(device), tokens)
        stages.append(_laid_out(stage, shape, layout, groups, sequence_length, device, compiled and not written))
    for stage in stages:
        stage.to_empty(device=device)
        _fill(stage, shape, layout.tensor, initial)
    return stages


def _laid_out(
    stage: Stage,
    shape: LlamaShape,
    layout: Layout,
    groups: Groups,
    sequence_length: int,
    device: torch.device,
    compiled: bool,
) -> Stage:
    rope, stage.rope = stage.rope, torch.empty(0)  # no part of what moves
    if groups.context is not None:
        heads = shape.heads // layout.tensor, shape.kv_heads // layout.tensor
        dtype = next(stage.parameters()).dtype
        kernel = fastest_kernel(*heads, shape.head_size, sequence_length // (2 * layout.context), device, dtype)
        for block in stage.blocks.values():
            block.attention = ContextAttention(kernel, groups.context)  # type: ignore[assignment]
    if groups.tensor is not None:
        ends = {name: style for name, style in ENDS_PLAN.items() if getattr(stage, name) is not None}
        parallelize_module(stage, groups.tensor, ends)
        for block in stage.blocks.values():
            parallelize_module(block, groups.tensor, BLOCK_PLAN)
    if layout.checkpointing != "none":
        for name, block in list(stage.blocks.items()):
            if not isinstance(block, WrittenBlock):
                stage.blocks[name] = Kept(block, layout.checkpointing)  # type: ignore[arg-type]
    if compiled:
        for block in stage.blocks.values():
            inner = isinstance(block, Kept) and block.checkpointing == "full"
            (block.block if inner else block).compile(dynamic=False)  # type: ignore[union-attr]
    if groups.data is not None:
        for block in stage.blocks.values():
            fully_shard(block, mesh=groups.data, reshard_after_forward=layout.reshard)
        fully_shard(stage, mesh=groups.data, reshard_after_forward=False)
    stage.rope = rope
    return stage


def _fill(stage: Stage, shape: LlamaShape, tensor: int, initial: Initial) -> None:
    """Give every parameter this rank's part of the whole one."""
    with torch.no_grad():
        for name, parameter in each_parameter(stage).items():
            if isinstance(parameter, DTensor):
                whole = regrouped(name, initial(name, tuple(parameter.shape)), shape, tensor)
                whole = whole.to(parameter.device, parameter.dtype)
                parts = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
                parameter.to_local().copy_(parts.to_local())
            else:
                parameter.copy_(initial(name, tuple(parameter.shape)))


def regrouped(name: str, weight: Tensor, shape: LlamaShape, tensor: int, *, back: bool = False) -> Tensor:
    """Rows of the matrices that are several in one, so that each of `tensor` equal parts has its share of every one."""
    sizes = {
        "qkv": [shape.heads * shape.head_size] + 2 * [shape.kv_heads * shape.head_size],
        "gate_up": 2 * [shape.intermediate_size],
    }
    rows = next((sizes[part] for part in sizes if f".{part}." in name), None)
    if rows is None or tensor == 1:
        return weight
    pieces = [index.chunk(tensor) for index in torch.arange(len(weight)).split(rows)]
    order = torch.cat([piece[part] for part in range(tensor) for piece in pieces])
    return weight[torch.argsort(order)] if back else weight[order]


def gathered_gradients(stages: list[Stage], shape: LlamaShape, tensor: int) -> dict[str, Tensor]:
    """Whole gradients of this rank's stages, by name, as one process has them. All ranks have to come here together."""
    found = {}
    for stage in stages:
        for name, parameter in each_parameter(stage).items():
            gradient = parameter.grad
            assert gradient is not None
            whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            found[name] = regrouped(name, whole, shape, tensor, back=True)
    return found


def sync_gradients(stages: list[Stage], *, last: bool, reshard: bool) -> None:
    """Whether the coming backward pass is the step's last, which averages gradients over copies; where weights stay
    gathered (`reshard` false) it is also the only one that divides gradients and gives the weights back."""
    for stage in stages:
        if isinstance(stage, FSDPModule):
            stage.set_requires_all_reduce(last)
            if not reshard:
                stage.set_requires_gradient_sync(last)
                stage.set_reshard_after_backward(last)


def numbers(stage: nn.Module) -> int:
    """How many parameters of the model this rank keeps."""
    return sum(math.prod(p.to_local().shape if isinstance(p, DTensor) else p.shape) for p in stage.parameters())
