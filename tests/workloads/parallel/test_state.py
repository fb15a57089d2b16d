"""Weights, gradients and optimizer states of a trainer, and what it refuses."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.parallel_ranks import BATCH, CPU, LENGTH, SHAPE, gather_gradients, tokens
from workloads.api.contract import Infeasible, Rank
from workloads.api.trial import run_trial
from workloads.instruments.distributed import process_group
from workloads.layouts.layout import Layout, State
from workloads.llama.fp8_quantize import Casts, Fp8Matrix
from workloads.parallel.apply import ModelSpec, build_groups, build_stages, fsdp_dtypes
from workloads.parallel.stage import build_initializer
from workloads.parallel.train import Batch, Trainer


def test_an_invalid_layout_is_infeasible_before_ranks_wait_for_each_other() -> None:
    with pytest.raises(Infeasible, match="= 2 ranks, but there are 4"):
        run_trial("parallel", {"model": "llama_tiny", "dtype": "fp32", "dp_shard": 2}, Rank(0, 4, ranks_per_node=4))


def test_gradients_of_bf16_products_are_accumulated_in_fp32_beside_fp32_weights() -> None:
    """Eight micro-batches, with and without gathering the weights for each, and the bf16 state beside them."""
    gradients, dtypes = {}, {}
    with process_group(Rank(), CPU):
        for dtype, state, reshard in CASES:
            layout = Layout(global_batch=BATCH, reshard_after_forward=reshard)
            trainer = build_trainer(ModelSpec(SHAPE, LENGTH, dtype, state=state), layout)
            trainer.compute_gradients(Batch(tokens()))
            name = "blocks.0.down.weight"
            gradients[dtype, state, reshard] = gather_gradients(trainer.stages, SHAPE, 1)[name].clone()
            trainer.update()
            reduced = {fsdp_dtypes(trainer.stages[0]).reduce_dtype} - {None}
            dtypes[dtype, state, reshard] = trainer.state_dtypes() | reduced
    exact = gradients[CASES[0]]
    errors = {case: float((gradient - exact).norm() / exact.norm()) for case, gradient in gradients.items()}
    assert all(dtypes[case] == {torch.float32 if case[1] == "fp32" else torch.bfloat16} for case in CASES)
    assert errors[CASES[1]] == pytest.approx(errors[CASES[2]], rel=0.01) and 0 < errors[CASES[1]] < errors[CASES[3]]


CASES: list[tuple[torch.dtype, State, bool]] = [
    (torch.float32, "fp32", True),
    (torch.bfloat16, "fp32", True),
    (torch.bfloat16, "fp32", False),
    (torch.bfloat16, "bf16", True),
]


def build_trainer(spec: ModelSpec, layout: Layout) -> Trainer:
    groups = build_groups(layout, "cpu")
    stages = build_stages(spec, layout, groups, CPU, build_initializer(0, CPU, is_tied=spec.shape.tied))
    return Trainer(stages, layout, groups, CPU, learning_rate=1e-3)


def test_scales_of_fp8_weights_are_read_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two micro-batches cast each weight four times. The step after it has other weights."""
    readings, cast_weight = list[bool](), Casts.cast_weight

    def count(casts: Casts, weight: Tensor, scale: Tensor | None = None, **parts: bool) -> list[Fp8Matrix]:
        readings.append(scale is None)
        return cast_weight(casts, weight, scale, **parts)

    monkeypatch.setattr(Casts, "cast_weight", count)
    with process_group(Rank(), CPU):
        spec = ModelSpec(SHAPE, LENGTH, torch.bfloat16, recipe="fp8_tensorwise", state="bf16", block="manual")
        trainer = build_trainer(spec, Layout(global_batch=2))
        block = trainer.stages[0].first_block
        trainer.compute_gradients(Batch(tokens()[:2]))
        assert readings.count(True) == len(readings) / 4
        first = dict(block.kept)
        with torch.no_grad():
            for weight in block.parameters():
                weight.mul_(8)
        trainer.compute_gradients(Batch(tokens()[:2]))
    assert len(first) == 6 and all(torch.equal(block.kept[name], 8 * scale) for name, scale in first.items())


def test_a_tied_model_trains() -> None:
    """Its head is its embedding, so the last stage has no head of its own."""
    shape = replace(SHAPE, tied=True)
    with process_group(Rank(), CPU):
        trainer = build_trainer(ModelSpec(shape, LENGTH, torch.float32), Layout(global_batch=2))
        losses = [float(trainer.step(Batch(tokens()[:2]))) for _ in range(3)]
    assert losses[0] > losses[1] > losses[2]


def test_a_group_that_a_failed_trial_has_left_does_not_disturb_the_next() -> None:
    """With several ranks it stays: destroying it waits for the other ranks, which may wait for this one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for _ in range(2):
        with process_group(Rank(), CPU):
            assert dist.get_world_size() == 1
    assert not dist.is_initialized()
