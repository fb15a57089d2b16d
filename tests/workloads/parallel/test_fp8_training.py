"""Layers of low precision train nearly the same in every layout."""

import importlib.util
from dataclasses import replace

import pytest
import torch

from tests.support.parallel_ranks import BATCH, SHAPE, STEPS, Ranks, Trained, assert_same_training
from workloads.api.contract import Infeasible, Rank
from workloads.api.trial import run_trial
from workloads.instruments import device as devices
from workloads.layouts.layout import Layout

needs_torchao = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs torchao")


@needs_torchao
@pytest.mark.long(11)
@pytest.mark.xdist_group("ranks")
def test_fp8_layers_train_the_same_in_every_layout_and_near_fp32(ranks: Ranks, reference: Trained) -> None:
    one_rank = Layout(micro_batch=4, global_batch=BATCH)
    (fp8_reference,) = ranks.train(one_rank, recipe="fp8_tensorwise")
    sharded = ranks.train(replace(one_rank, dp_shard=2), recipe="fp8_tensorwise")
    assert all(rank.fp8_gathers["fp8_all_gather"] for rank in sharded)  # FSDP casts weights before it gathers them
    # Weights differ by a ten-millionth after a step, so here and there a number rounds to another fp8 number.
    assert_same_training(sharded, fp8_reference, later_tolerance=2e-3)
    piped = ranks.train(replace(one_rank, pp=2), recipe="fp8_tensorwise")
    assert_same_training(piped, fp8_reference, later_tolerance=2e-3)
    fp8_losses, fp32_losses = fp8_reference.losses, reference.losses
    assert fp8_losses == pytest.approx(fp32_losses, abs=0.02)
    assert fp8_losses != pytest.approx(fp32_losses, abs=1e-6)


@needs_torchao
@pytest.mark.long(8)
@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize(
    ("recipe", "dp_shard"),
    [
        ("fp8_tensorwise", 2),
        ("fp8_rowwise", 1),
        pytest.param("fp8_tensorwise", 1, marks=pytest.mark.soak),
        pytest.param("fp8_rowwise", 2, marks=pytest.mark.soak),
    ],
)
def test_fp8_with_tensor_parallelism_trains_like_one_process(recipe: str, dp_shard: int, ranks: Ranks) -> None:
    """Sums outside the products differ by a ten-millionth, so here and there a number rounds to another fp8 number."""
    one_rank = Layout(micro_batch=4, global_batch=BATCH)
    (expected,) = ranks.train(one_rank, recipe=recipe, exact_fp8_sums=True)
    for rank in ranks.train(replace(one_rank, tp=2, dp_shard=dp_shard), recipe=recipe, exact_fp8_sums=True):
        casts_first = recipe == "fp8_tensorwise"
        assert rank.fp8_gathers == {"fp8_all_gather": casts_first and dp_shard > 1, "fp8_tp_all_gather": casts_first}
        assert rank.losses[0] == pytest.approx(expected.losses[0], abs=1e-5)
        assert rank.norm == pytest.approx(expected.norm, rel=1e-4)
        for name, gradient in expected.gradients.items():
            assert (rank.gradients[name] - gradient).norm() < 0.02 * gradient.norm(), name
        assert rank.losses == pytest.approx(expected.losses, abs=0.02)


@needs_torchao
@pytest.mark.long(6)
@pytest.mark.xdist_group("ranks")
def test_emulated_mxfp8_trains_like_one_process_with_fsdp_and_near_bf16(ranks: Ranks) -> None:
    one_rank = Layout(micro_batch=4, global_batch=BATCH)
    (expected,) = ranks.train(one_rank, recipe="mxfp8", dtype=torch.bfloat16)
    (bf16,) = ranks.train(one_rank, dtype=torch.bfloat16)
    assert expected.losses == pytest.approx(bf16.losses, abs=0.02)
    assert expected.losses != pytest.approx(bf16.losses, abs=1e-6)
    for rank in ranks.train(replace(one_rank, dp_shard=2), recipe="mxfp8", dtype=torch.bfloat16):
        assert rank.losses == pytest.approx(expected.losses, abs=1e-5)


@pytest.mark.long(6)
@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("recipe", ["fp8_tensorwise", "fp8_blockwise"])
def test_the_manual_block_in_fp8_trains_like_one_process_with_fsdp_and_near_bf16(recipe: str, ranks: Ranks) -> None:
    fields = {"block": "manual", "dtype": torch.bfloat16}
    one_rank = Layout(micro_batch=4, global_batch=BATCH)
    (expected,) = ranks.train(one_rank, recipe=recipe, **fields)
    (bf16,) = ranks.train(one_rank, **fields)
    assert expected.losses == pytest.approx(bf16.losses, abs=0.02)
    assert expected.losses != pytest.approx(bf16.losses, abs=1e-6)
    for rank in ranks.train(replace(one_rank, dp_shard=2, checkpointing="selective"), recipe=recipe, **fields):
        assert rank.losses == pytest.approx(expected.losses, abs=2e-3)
        for name, gradient in expected.gradients.items():
            assert (rank.gradients[name] - gradient).norm() < 0.02 * gradient.norm(), name


@pytest.mark.long(6)
@pytest.mark.xdist_group("ranks")
def test_matrices_that_stay_in_fp8_are_gathered_once_a_step_and_train_the_same(ranks: Ranks) -> None:
    fields = {"block": "manual", "dtype": torch.bfloat16, "recipe": "fp8_tensorwise"}
    gathered_again = Layout(dp_shard=2, micro_batch=1, global_batch=BATCH)
    (expected, _) = ranks.train(gathered_again, **fields)
    stays = replace(gathered_again, reshard_after_forward=False)
    for rank in ranks.train(stays, keeps_weights=True, **fields):
        assert rank.losses == expected.losses
        assert all(torch.equal(rank.gradients[name], gradient) for name, gradient in expected.gradients.items())
        assert rank.calls["calls_allgather_base"] == (SHAPE.layers + 2) * (STEPS - 1)  # blocks, embedding and head
        assert rank.calls["calls_reduce_scatter_base"] == (SHAPE.layers + 2) * (STEPS - 1) * stays.microbatches


def test_a_missing_torchao_is_infeasible_before_ranks_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torchao" else find_spec(name))
    monkeypatch.setattr(devices, "architecture", lambda _: "sm90")
    layout = {"dp_shard": 2, "global_batch": 2, "dtype": "fp8_tensorwise"}
    with pytest.raises(Infeasible, match="torchao is not installed"):
        run_trial("parallel", {"model": "llama_tiny", "sequence_length": 64, **layout}, Rank(0, 2, ranks_per_node=2))
