"""Tensor parallelism: ranks divide attention and dense MLPs, and the sequence everywhere else.

A rank sends its own tokens through its copy of the router, of the shared expert and, if `ep` is 1, of all experts. If
`ep` is above 1, the groups that divide the experts include tensor-parallel ranks. A copy's gradient covers only the
rank's tokens. It is a partial DTensor, which FSDP sums over ranks when it reduces the gradient; without FSDP, the
optimizer's operations sum it.
"""

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from workloads.instruments.torch_internals import gather_rows
from workloads.llama.experts import local_part
from workloads.llama.model import Block
from workloads.models.model import Model
from workloads.parallel.stage import Stage

ENDS_PLAN: dict[str, ParallelStyle] = {
    "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "head.norm": SequenceParallel(use_local_output=True),
    "head.lm_head": ColwiseParallel(),
}
# The layers of experts that read a rank's own tokens, [tokens, features].
TOKEN_LAYERS = ("router", "shared_gate_up", "shared_down", "shared_gate")


def divide_stage(stage: Stage, mesh: DeviceMesh, recipe: str) -> None:
    """Divide a stage over the ranks of `mesh`. Experts that are divided among ranks stay as they are."""
    _apply_plan(stage, mesh, ENDS_PLAN)
    for block in stage.blocks.values():
        assert isinstance(block, Block)
        if block.shape.qk_norm == "all":
            block.q_norm, block.k_norm = (DividedNorm(norm, mesh) for norm in (block.q_norm, block.k_norm))
        _apply_plan(block, mesh, _block_plan(block.shape, recipe))
        if block.shape.gpt_oss:
            _distribute(block, ("sinks",), mesh, Shard(0))
        if block.has_experts and not block.experts.divided:
            _distribute(block.experts, block.experts.stacked, mesh, Replicate())


def _block_plan(shape: Model, recipe: str) -> dict[str, ParallelStyle]:
    """Return the plan for a block. Block inputs and outputs are sharded along the sequence, and the tensors inside
    along heads and intermediate size. With a scale per tensor, inputs are cast to fp8 before gathering. With scales per
    row, inputs are gathered in bf16, as in torchtitan 0.2.2 (parallelize_llama in
    torchtitan/models/llama3/infra/parallelize.py). In torchtitan, PrepareFloat8ModuleInput casts once for q, k and v,
    and once for gate and up. In this project, qkv and gate_up are single GEMMs, which cast their own inputs."""
    columns, rows = ColwiseParallel, RowwiseParallel
    if recipe == "fp8_tensorwise":
        from torchao.float8.float8_tensor_parallel import Float8ColwiseParallel, Float8RowwiseParallel

        columns, rows = Float8ColwiseParallel, Float8RowwiseParallel
    head_norms = ("q_norm", "k_norm") if shape.qk_norm == "head" else ()  # of [batch, length, heads, head_size]
    return {
        **dict.fromkeys(("attention_norm", "mlp_norm"), SequenceParallel(use_local_output=True)),
        **dict.fromkeys(("qkv", "gate_up"), columns(input_layouts=Shard(1))),
        **dict.fromkeys(("output", "down"), rows(output_layouts=Shard(1))),
        **dict.fromkeys(head_norms, SequenceParallel(sequence_dim=2, use_local_output=True)),
        **{f"experts.{name}": SequenceParallel(sequence_dim=0, use_local_output=True) for name in TOKEN_LAYERS},
    }


def _apply_plan(module: nn.Module, mesh: DeviceMesh, plan: dict[str, ParallelStyle]) -> None:
    names = dict(module.named_modules())
    parallelize_module(module, mesh, {name: style for name, style in plan.items() if name in names})


def _distribute(module: nn.Module, names: tuple[str, ...], mesh: DeviceMesh, placement: Placement) -> None:
    for name in names:
        distributed = distribute_tensor(getattr(module, name), mesh, [placement], src_data_rank=None)
        setattr(module, name, nn.Parameter(distributed))


class DividedNorm(nn.RMSNorm):
    """An RMS norm over features that ranks divide. Ranks exchange only the sums of squares."""

    def __init__(self, whole: nn.RMSNorm, mesh: DeviceMesh) -> None:
        super().__init__(whole.normalized_shape, whole.eps, device=whole.weight.device, dtype=whole.weight.dtype)
        self._group_name = mesh.get_group().group_name
        _distribute(self, ("weight",), mesh, Shard(0))

    def forward(self, x: Tensor) -> Tensor:
        values = x.float()
        squares = gather_rows(values.square().sum(dim=-1, keepdim=True)[None], 0, self._group_name).sum(dim=0)
        scale = torch.rsqrt(squares / self.normalized_shape[0] + self.eps)
        return (values * scale * local_part(self.weight).float()).to(x.dtype)


def reorder_fused_rows(name: str, weight: Tensor, shape: Model, tp: int) -> Tensor:
    """Reorder the rows of fused matrices (qkv, gate_up) so that each of `tp` parts has a share of each component."""
    kv_rows = shape.kv_heads * shape.head_size
    fused_rows = {
        "qkv": [shape.heads * shape.head_size, kv_rows, kv_rows],
        "gate_up": [shape.intermediate_size, shape.intermediate_size],
    }
    rows = next((fused_rows[layer] for layer in fused_rows if f".{layer}." in name), None)
    if rows is None or tp == 1:
        return weight
    pieces = [index.chunk(tp) for index in torch.arange(len(weight)).split(rows)]
    return weight[torch.cat([piece[part] for part in range(tp) for piece in pieces])]
