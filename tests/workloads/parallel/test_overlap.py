"""Collectives inside a compiled block run beside its GEMMs."""

import re
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch._inductor.utils import fresh_inductor_cache, run_and_get_code
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.support.parallel_ranks import CPU, LENGTH, draw_batch, initialize
from workloads.layouts.layout import Layout
from workloads.models.model import MODELS
from workloads.parallel.apply import ModelSpec, build_groups, build_stages

# What the code of a block does: a collective starts (+) or is waited for (-), or a GEMM runs (x).
CALLS = re.compile(r"_c10d_functional\.(\w+)\.default\(|(?:extern_kernels\.(?:add)?mm|multiply_groups\.default)\(")


@pytest.mark.soak  # compiles C++
@pytest.mark.parametrize(
    ("model", "degrees", "hidden"),
    [("llama_tiny", {"tp": 2}, 3), ("qwen3_moe_tiny", {"dp_shard": 2, "ep": 2}, 2)],
)
def test_a_compiled_backward_pass_multiplies_while_gradients_are_exchanged(
    model: str, degrees: dict[str, int], hidden: int
) -> None:
    shape = replace(MODELS[model], layers=1)
    layout = Layout(**degrees, checkpointing="selective", micro_batch=2, global_batch=4)  # type: ignore[arg-type]
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        spec = ModelSpec(shape, LENGTH, torch.float32, compiled=True)
        (stage,) = build_stages(spec, layout, build_groups(layout, "cpu"), CPU, initialize)
        with fresh_inductor_cache():
            _, codes = run_and_get_code(lambda: stage(draw_batch(range(2)).tokens[:, :-1]).sum().backward())
    finally:
        dist.destroy_process_group()
    signs = [{"wait_tensor": "-", None: "x"}.get(call[1], "+") for call in CALLS.finditer(codes[-1])]
    assert len(re.findall(r"\+x+-", "".join(signs))) == hidden, "".join(signs)
