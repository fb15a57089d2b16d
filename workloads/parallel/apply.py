"""Apply a layout to a model. The order of the steps matters:

1. Pipeline: build only this rank's layers, on the meta device.
2. Context parallelism: let each block attend over its process group. Document masks: keep attention within documents.
3. Expert parallelism: keep this rank's experts. Tensor parallelism: shard every block's matrices before anything wraps
   the block, since the plan refers to them by name.
4. Checkpointing: wrap blocks so that their sharded computation is recomputed. Blocks with a manual backward pass do
   their own checkpointing.
5. Compilation: compile whole blocks including their checkpointing, so that GEMMs are not repeated if the backward pass
   does not read their results. In blocks with a manual backward pass, only the operations between GEMMs are compiled.
6. FSDP: wrap last, since it accepts parameters as they are, sharded or not, and gathers them just before a block runs.
7. Allocate each rank's memory and fill it with weights that do not depend on the layout.
"""

import os
import warnings
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.distributed.tensor import DTensor, distribute_tensor

from workloads.estimator.pipeline import stage_layers
from workloads.instruments.device import architecture
from workloads.instruments.torch_internals import input_style
from workloads.layouts.layout import Layout, State
from workloads.llama.attention import AttentionShape, fastest_kernel
from workloads.llama.fp8_block import build_block_math
from workloads.llama.model import Block, rope_table
from workloads.llama.pytorch_attention import DocumentAttention
from workloads.models.model import Model
from workloads.models.routing import NATURAL, Routing
from workloads.parallel import BlockKind
from workloads.parallel.context import ContextAttention, local_positions
from workloads.parallel.stage import CheckpointedBlock, Initializer, ManualBackwardBlock, Stage, named_llama_parameters
from workloads.parallel.tensor import divide_stage, reorder_fused_rows
from workloads.precision.layers import apply_recipe, fill_buffers, gathers_fp8

GROUPS_PER_TRIAL = 1000  # more than a layout creates


# The compiler starts a block's collectives as early as possible and waits for them as late as possible. By default, it
# waits immediately, although some gradients of weights do not need what is exchanged.
OVERLAP = {
    "reorder_for_compute_comm_overlap": True,
    "reorder_for_compute_comm_overlap_passes": ["raise_comms", "sink_waits"],
}


# Asynchronous tensor parallelism: PyTorch's compiler fuses an all-gather with the following GEMMs, and a GEMM with the
# following reduce-scatter, over memory that all ranks of the group map (symmetric memory;
# torchtitan/distributed/compile.py enables it in the same way).
def separate_group_names(sequence_number: int) -> None:
    """Make the names of process groups created from now on unique among this process's trials.

    Symmetric memory stores group data by name for the life of the process, and group names are numbered from 0 again
    after `destroy_process_group`. All ranks must call this function with the same number.
    """
    dist.distributed_c10d._world.group_count += GROUPS_PER_TRIAL * sequence_number


def enable_async_tp(group: dist.ProcessGroup) -> dict[str, Any]:
    """Enable symmetric memory for a tensor-parallel group. Returns the compiler options for blocks."""
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    if torch.cuda.device_count() == 1:
        # A worker sees only its own GPU, so all ranks have device 0. Without this setting, PyTorch would treat them as
        # the same GPU (validate_rendezvous_requests in CUDASymmetricMemory.cu).
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    with warnings.catch_warnings():  # deprecated, but the compiler still reads this setting (2.13)
        warnings.simplefilter("ignore", FutureWarning)
        enable_symm_mem_for_group(group.group_name)
    return {"_micro_pipeline_tp": True}


class OnePoolReduceScatter(DefaultReduceScatter):
    """Reduces gradients that live until the optimizer's step into memory of the stream that computes.

    FSDP's own stream has another memory pool, which keeps their memory (15 GiB for 8B over two GPUs in fp32) while a
    step's other micro-batches need it. Unsafe for gradients that FSDP accumulates or casts: it frees them too early.
    """

    def allocate(self, *size: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
        with torch.cuda.stream(torch.cuda.default_stream()):
            return super().allocate(*size, dtype=dtype, device=device)


def shard_stage(stage: Stage, mesh: DeviceMesh, dtype: torch.dtype, *, reshard_after_forward: bool) -> None:
    """Wrap the units of a stage in FSDP: the embedding, every block, and the last norm with the head.

    torchtitan 0.2.2 does the same (apply_fsdp in torchtitan/models/llama3/infra/parallelize.py). A unit is gathered
    while the unit before it computes. If they were one unit, embedding and head would be gathered before the first
    block and reduced after the last backward pass, without overlap. Weights are gathered in `dtype`, and gradients are
    reduced in their own data type.

    The head stays gathered after the forward pass, since the backward pass begins with the head. If the head shares the
    embedding's matrix, this matrix and the norm are in the unit of the whole stage, which stays gathered too.
    """
    state_dtype = next(stage.parameters()).dtype
    # A block's other inputs, such as the rotary embedding's tensors in fp32, are not cast.
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=state_dtype, cast_forward_inputs=False)
    shard = partial(fully_shard, mesh=mesh, mp_policy=policy, ignored_params=set(stage.divided_experts))
    if stage.embedding is not None and not stage.shape.tied:
        shard(stage.embedding, reshard_after_forward=reshard_after_forward)
    for block in stage.blocks.values():
        shard(block, reshard_after_forward=reshard_after_forward)
    if stage.head is not None and not stage.shape.tied:
        shard(stage.head, reshard_after_forward=False)
    shard(stage, reshard_after_forward=False)


def free_gathered_matrices(module: nn.Module) -> None:
    """Free a wrapped module's gathered matrices, which FSDP then takes for gathered until it shards them again."""
    for parameter in fully_shard.state(module)._fsdp_param_group.fsdp_params:  # type: ignore[attr-defined]
        if parameter.sharded_param.dim() == 2:
            parameter.free_unsharded_param()


def set_gradient_sync(stages: list[Stage], layout: Layout, *, is_last_microbatch: bool, keeps_weights: bool) -> None:
    """Configure FSDP's communication for the next backward pass.

    Gradients are averaged over replicas only in the last micro-batch of a step. Without `reshard_after_forward`,
    weights stay gathered until then, and gradients are also reduce-scattered only in that micro-batch, except those of
    blocks with a manual backward pass. With `reshard_after_forward`, weights stay gathered until the next forward pass
    if `keeps_weights` is set.
    """
    for stage in stages:
        if isinstance(stage, FSDPModule):
            stage.set_requires_all_reduce(is_last_microbatch)
            if not layout.reshard_after_forward and not isinstance(stage.first_block, ManualBackwardBlock):
                stage.set_requires_gradient_sync(is_last_microbatch)
            if keeps_weights or not layout.reshard_after_forward:
                stage.set_reshard_after_backward(is_last_microbatch)


def precompute_fp8_scales(stage: Stage) -> None:
    """Compute the scales of all weights gathered in fp8 at once, instead of one at a time during gathering."""
    if any(gathers_fp8(module) for module in stage.modules()):
        from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

        precompute_float8_dynamic_scale_for_fsdp(stage)


def fsdp_dtypes(module: nn.Module) -> MixedPrecisionPolicy:
    """Return the data types in which FSDP gathers the module's weights and reduces its gradients; None without FSDP."""
    # PyTorch has no public way to read this policy back (torch 2.11 to 2.13).
    return fully_shard.state(module)._mp_policy if isinstance(module, FSDPModule) else MixedPrecisionPolicy()  # type: ignore[attr-defined]


@dataclass(frozen=True)
class ModelSpec:
    """The model to train, apart from its layout."""

    shape: Model
    sequence_length: int
    dtype: torch.dtype  # of activations, gathered weights, and GEMMs in blocks without a recipe
    recipe: str = ""  # for the GEMMs in blocks, in torchao's layers or the manual block; empty for none
    compiled: bool = False  # each block separately
    state: State = "fp32"  # of weights, gradients and optimizer states between steps; bf16 means `dtype`
    block: BlockKind = "pytorch"  # the backward pass of blocks
    document_tokens: int = 0  # mean length of the documents in a sequence; 0 for one document
    routing: Routing = NATURAL  # of tokens to experts, if the model has experts

    @property
    def state_dtype(self) -> torch.dtype:
        return torch.float32 if self.state == "fp32" else self.dtype


@dataclass(frozen=True)
class Groups:
    """The process groups of a layout."""

    mesh: DeviceMesh  # pp, dp_replicate, dp_shard_cp (cp within each shard group) and tp
    cp_group: dist.ProcessGroup | None  # this rank's group; None without context parallelism
    ep_group: dist.ProcessGroup | None  # the ranks that divide the experts; None without expert parallelism
    expert_group: dist.ProcessGroup | None  # the ranks that have copies of the same experts

    @property
    def tp_mesh(self) -> DeviceMesh | None:  # None without tensor parallelism
        return self.mesh["tp"] if self.mesh["tp"].size() > 1 else None


def build_groups(layout: Layout, device_type: str) -> Groups:
    """Create the process groups. This is a collective operation that all ranks must call."""
    sizes = (layout.pp, layout.dp_replicate, layout.dp_shard * layout.cp, layout.tp)
    mesh = init_device_mesh(device_type, sizes, mesh_dim_names=("pp", "dp_replicate", "dp_shard_cp", "tp"))
    cp_group = ep_group = expert_group = None
    if layout.cp > 1:
        ranks = mesh.mesh.unflatten(2, (layout.dp_shard, layout.cp)).movedim(3, -1).reshape(-1, layout.cp)
        cp_group, _ = dist.new_subgroups_by_enumeration(ranks.tolist())
    if layout.ep > 1:  # neighbors among the ranks that share a copy's states, and their tensor-parallel ranks
        ranks = mesh.mesh.flatten(2).unflatten(2, (-1, layout.ep))
        ep_group, _ = dist.new_subgroups_by_enumeration(ranks.reshape(-1, layout.ep).tolist())
        copies = ranks.movedim(3, 1).flatten(2)
        expert_group, _ = dist.new_subgroups_by_enumeration(copies.reshape(-1, copies.shape[-1]).tolist())
    return Groups(mesh, cp_group, ep_group, expert_group)


def build_stages(
    spec: ModelSpec, layout: Layout, groups: Groups, device: torch.device, initialize: Initializer
) -> list[Stage]:
    """Return this rank's stages, ready to train. Raises Infeasible if the sizes do not fit the recipe."""
    shape, pp_rank = spec.shape, groups.mesh["pp"].get_local_rank()
    rope = rope_table(shape, spec.sequence_length, device)
    if groups.cp_group is not None:
        positions = local_positions(spec.sequence_length, layout.cp, dist.get_rank(groups.cp_group))
        rope = rope[:, positions.to(device)]
    block_math = None
    if spec.block == "manual":
        kernel = fastest_kernel(AttentionShape.of_model(shape, spec.sequence_length, spec.dtype), device)
        block_math = build_block_math(shape, kernel, spec.recipe, compiled=spec.compiled)

    def build_block(layer: int) -> Block:
        return ManualBackwardBlock(block_math, layout.checkpointing_of(layer)) if block_math else Block(shape, layer)

    tokens = layout.micro_batch * spec.sequence_length // layout.cp
    # PyTorch's pipeline schedules divide gradients by the number of micro-batches (scale_grads).
    loss_share = (1 / layout.microbatches if layout.pp == 1 else 1.0) / layout.tp
    stages = []
    layers_of_stages = stage_layers(shape.layers, layout.stages, *layout.less_layers)
    for layers in (layers_of_stages[index] for index in layout.list_stages(pp_rank)):
        with torch.device("meta"):
            stage = Stage(shape, layers, rope, build_block).to(spec.state_dtype)
        if spec.recipe and block_math is None:
            casts_first = spec.recipe == "fp8_tensorwise" and layout.is_sharded
            apply_recipe(stage.blocks, spec.recipe, architecture(device), tokens, gathers_fp8=casts_first)
        stages.append(_apply_layout(stage, spec, layout, groups, device))
    for stage in stages:
        stage.to_empty(device=device)
        fill_buffers(stage, seed=0)
        for layer, experts in stage.experts.items():
            experts.bias.zero_()  # `to_empty` leaves the bias uninitialized
            routing = replace(spec.routing, seed=spec.routing.seed + layer)
            experts.start(routing, tokens // layout.tp, device, loss_share=loss_share)
        _initialize_parameters(stage, shape, layout.tp, initialize)
    return stages


def _apply_layout(stage: Stage, spec: ModelSpec, layout: Layout, groups: Groups, device: torch.device) -> Stage:
    rope, stage.rope = stage.rope, torch.empty(0)  # the table must not be sharded or moved
    if groups.cp_group is not None:
        part_length = spec.sequence_length // (2 * layout.cp)
        kernel = fastest_kernel(AttentionShape.of_model(spec.shape, part_length, spec.dtype, layout.tp), device)
        for block in stage.blocks.values():
            block.attention = ContextAttention(kernel, groups.cp_group, layout.cp_method)  # type: ignore[assignment]
    if spec.document_tokens:
        for block in stage.blocks.values():
            block.attention = DocumentAttention(spec.sequence_length, spec.document_tokens, device)  # type: ignore[assignment]
    if groups.ep_group is not None:
        for experts in stage.experts.values():
            experts.divide(groups.ep_group)
    if groups.tp_mesh is not None:
        divide_stage(stage, groups.tp_mesh, spec.recipe)
    for name, block in list(stage.blocks.items()):
        checkpointing = layout.checkpointing_of(int(name))
        if checkpointing != "none" and not isinstance(block, ManualBackwardBlock):
            stage.blocks[name] = CheckpointedBlock(block, checkpointing)  # type: ignore[arg-type]
    if spec.compiled and spec.block == "pytorch":
        options: dict[str, Any] | None = OVERLAP if layout.tp > 1 or layout.ep > 1 else None
        if layout.tp_overlap == "async" and groups.tp_mesh is not None:
            options = enable_async_tp(groups.tp_mesh.get_group())
        # The compiler cannot store a DTensor's mesh for full recomputation (torch 2.13).
        is_outside = layout.checkpointing == "full" and groups.tp_mesh is not None
        for block in stage.blocks.values():
            compiled: Any = getattr(block, "block", block) if is_outside else block
            compiled.compile(dynamic=False, fullgraph=True, options=options)
    if layout.uses_fsdp(spec.state):
        # Gradients are averaged over the mesh, which may have only one rank.
        mesh = groups.mesh["dp_replicate", "dp_shard_cp"] if layout.dp_replicate > 1 else groups.mesh["dp_shard_cp"]
        shard_stage(stage, mesh, spec.dtype, reshard_after_forward=layout.reshard_after_forward)
        is_manual, is_gathered = isinstance(stage.first_block, ManualBackwardBlock), not layout.reshard_after_forward
        if is_manual and is_gathered and spec.recipe and layout.is_sharded:
            for block in stage.blocks.values():
                block.free_matrices = partial(free_gathered_matrices, block)  # type: ignore[assignment]
        if mesh.device_type == "cuda" and mesh.ndim == 1 and is_gathered and not is_manual:  # reduces once a step
            for module in (module for module in stage.modules() if isinstance(module, FSDPModule)):
                module.set_custom_reduce_scatter(OnePoolReduceScatter())
    stage.rope = rope
    return stage


def fp8_gathers(stage: Stage) -> dict[str, bool]:
    """Return whether a block's weights, and its tensor-parallel inputs, are cast to fp8 before they are gathered."""
    layer = stage.first_block.qkv
    return {"fp8_all_gather": gathers_fp8(layer), "fp8_tp_all_gather": input_style(layer) == "Float8ColwiseParallel"}


def _initialize_parameters(stage: Stage, shape: Model, tp: int, initialize: Initializer) -> None:
    divided_experts = stage.divided_experts
    with torch.no_grad():
        for name, parameter in named_llama_parameters(stage).items():
            if isinstance(parameter, DTensor):
                full = reorder_fused_rows(name, initialize(name, tuple(parameter.shape)), shape, tp)
                full = full.to(parameter.device, parameter.dtype)
                divided = distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None)
                parameter.to_local().copy_(divided.to_local())
            elif experts := divided_experts.get(parameter):
                whole = initialize(name, (experts.shape.experts, *parameter.shape[1:]))
                parameter.copy_(whole.chunk(experts.ranks)[experts.rank])
            else:
                parameter.copy_(initialize(name, tuple(parameter.shape)))
