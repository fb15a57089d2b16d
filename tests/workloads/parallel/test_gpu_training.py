"""A model divided over two GPUs trains as it does in one CPU process, with NCCL between them."""

from dataclasses import replace

import pytest
import torch

from tests.support.parallel_layouts import LAYOUTS, LONG_LAYOUTS
from tests.support.parallel_ranks import BATCH, Ranks, Trained, assert_same_training
from workloads.layouts.layout import SPLIT_SCHEDULES, Checkpointing, Layout
from workloads.parallel import TORCH_VERSION, BlockKind

# Gradients of these are reduced in the last of several micro-batches.
GATHERED = [
    Layout(**{degree: 2}, micro_batch=1, reshard_after_forward=False, global_batch=BATCH)
    for degree in ("dp_shard", "tp", "cp", "pp")
]


@pytest.mark.gpu
@pytest.mark.parametrize("layout", GATHERED + [one for one in LAYOUTS + LONG_LAYOUTS if one.gpus == 2], ids=str)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_layouts_over_two_gpus_train_like_one_cpu_process(
    layout: Layout, compiled: bool, gpus: Ranks, reference: Trained
) -> None:
    if layout.schedule in SPLIT_SCHEDULES and (compiled or TORCH_VERSION < (2, 13)):
        pytest.skip("a split backward pass needs blocks that are not compiled, and torch 2.13")
    assert_same_training(gpus.train(layout, compiled=compiled), reference, tolerance=2e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_asynchronous_tensor_parallel_trains_like_one_cpu_process_trial_after_trial(
    checkpointing: Checkpointing, gpus: Ranks, reference: Trained
) -> None:
    layout = Layout(tp=2, tp_overlap="async", micro_batch=4, checkpointing=checkpointing, global_batch=BATCH)
    assert_same_training(gpus.train(layout, compiled=True), reference, tolerance=2e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("block", ["pytorch", "manual"])
def test_a_cuda_graph_trains_like_one_cpu_process(
    block: BlockKind, compiled: bool, gpus: Ranks, reference: Trained
) -> None:
    layout = Layout(micro_batch=2, cuda_graph=True, global_batch=BATCH)
    trained = gpus.train(layout, block=block, compiled=compiled, state="bf16")  # without FSDP; the products are in fp32
    assert_same_training(trained, reference, tolerance=2e-5)


# Sequences that leave each rank 16 tokens and more, as fp8 products of a GPU need.
FP8_LAYOUTS = [
    Layout(dp_shard=2, micro_batch=2),
    Layout(dp_shard=2, micro_batch=2, reshard_after_forward=False),
    Layout(tp=2, micro_batch=2),
    Layout(pp=2, micro_batch=2),
]


@pytest.mark.gpu
@pytest.mark.parametrize("layout", [replace(layout, global_batch=BATCH) for layout in FP8_LAYOUTS], ids=str)
@pytest.mark.parametrize(
    ("recipe", "block"),
    [
        ("fp8_tensorwise", "pytorch"),
        ("fp8_rowwise", "pytorch"),
        ("fp8_tensorwise", "manual"),
        ("fp8_blockwise", "manual"),
    ],
)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_fp8_layouts_over_two_gpus_train_nearly_like_fp32(
    layout: Layout, recipe: str, block: BlockKind, compiled: bool, gpus: Ranks, reference: Trained
) -> None:
    """bf16 beside fp8, as scaled products give bf16; with tensor parallelism fp8 is gathered over NCCL."""
    if block == "manual" and layout.tp > 1:
        pytest.skip("the manual block has whole weights")
    for rank in gpus.train(layout, recipe=recipe, block=block, compiled=compiled, dtype=torch.bfloat16):
        assert rank.losses == pytest.approx(reference.losses, abs=0.05)
        assert rank.norm == pytest.approx(reference.norm, rel=0.1)
