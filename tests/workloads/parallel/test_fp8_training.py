"""Layers of low precision train nearly the same in every layout."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.parallel_ranks import (
    BATCH,
    Ranks,
    Trained,
    assert_same_training,
)
from workloads.parallel.layout import Layout


@pytest.mark.long(11)
@pytest.mark.xdist_group("ranks")
def test_fp8_layers_train_the_same_in_every_layout_and_near_fp32(ranks: Ranks, reference: Trained) -> None:
    one_rank = Layout(micro_batch=2, global_batch=BATCH)
    (fp8_reference,) = ranks.train(one_rank, recipe="fp8_tensorwise")
    # FSDP casts weights before it gathers them.
    assert_same_training(ranks.train(replace(one_rank, dp_shard=2), recipe="fp8_tensorwise"), fp8_reference)
    assert_same_training(ranks.train(replace(one_rank, pp=2), recipe="fp8_tensorwise"), fp8_reference)
    fp8_losses, fp32_losses = fp8_reference.losses, reference.losses
    assert fp8_losses == pytest.approx(fp32_losses, abs=0.02)
    assert fp8_losses != pytest.approx(fp32_losses, abs=1e-6)


@pytest.mark.soak
@pytest.mark.parametrize("recipe", ["fp8_tensorwise", "fp8_rowwise"])
@pytest.mark.parametrize("dp_shard", [1, 2])
def test_fp8_layers_train_nearly_the_same_with_tensor_parallelism(recipe: str, dp_shard: int, ranks: Ranks) -> None:
    """Sums in another order are rounded to other fp8 numbers here and there."""
    one_rank = Layout(micro_batch=2, global_batch=BATCH)
    (expected,) = ranks.train(one_rank, recipe=recipe)
    for rank in ranks.train(replace(one_rank, tp=2, dp_shard=dp_shard), recipe=recipe):
        assert rank.losses == pytest.approx(expected.losses, abs=2e-3)
        assert rank.norm == pytest.approx(expected.norm, rel=0.02)


# Sequences that leave each rank 16 tokens and more, as fp8 products of a GPU need.
