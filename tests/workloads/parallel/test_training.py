"""A model divided over ranks trains as it does in one process: real processes, with gloo between them."""

from dataclasses import replace
from functools import partialmethod
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.fx import GraphModule

from tests.support.parallel_layouts import LAYOUTS, LONG_LAYOUTS, MANUAL_LAYOUTS
from tests.support.parallel_ranks import (
    BATCH,
    CPU,
    GPT_OSS,
    LENGTH,
    SHAPE,
    Ranks,
    Trained,
    assert_same_training,
    draw_batch,
    tokens,
    train_in_one_process,
)
from workloads.api.contract import Rank
from workloads.instruments.distributed import process_group
from workloads.layouts.layout import Layout
from workloads.llama.pytorch_attention import causal_attention
from workloads.models.model import Model
from workloads.parallel.apply import ModelSpec, build_groups, build_stages
from workloads.parallel.stage import Stage, build_initializer


@pytest.mark.long(40)
@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout_trains_like_one_process(layout: Layout, ranks: Ranks, reference: Trained) -> None:
    assert_same_training(ranks.train(layout), reference)


@pytest.mark.long(10)
@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("layout", MANUAL_LAYOUTS, ids=str)
def test_the_manual_block_trains_like_one_process(layout: Layout, ranks: Ranks, reference: Trained) -> None:
    assert_same_training(ranks.train(layout, block="manual"), reference)


@pytest.mark.xdist_group("ranks")
def test_weights_that_stay_gathered_for_the_next_micro_batch_are_gathered_once_less(
    ranks: Ranks, reference: Trained
) -> None:
    layout = Layout(dp_shard=2, micro_batch=1, global_batch=BATCH)
    kept = ranks.train(layout, block="manual", keeps_weights=True)
    assert_same_training(kept, reference)
    units = SHAPE.layers + 1  # blocks and the embedding: in each backward pass and one forward pass; the head once
    assert kept[0].calls["calls_allgather_base"] == units * (layout.microbatches + 1) + 1


@pytest.mark.soak
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout_with_the_manual_block_trains_like_one_process(
    layout: Layout, ranks: Ranks, reference: Trained
) -> None:
    if layout.tp * layout.cp > 1 or layout.schedule == "zero_bubble":
        pytest.skip("the manual block has whole weights and sequences, and one backward pass")
    assert_same_training(ranks.train(layout, block="manual"), reference)


@pytest.mark.soak
@pytest.mark.parametrize("layout", LONG_LAYOUTS, ids=str)
def test_every_long_layout_trains_like_one_process(layout: Layout, ranks: Ranks, reference: Trained) -> None:
    assert_same_training(ranks.train(layout), reference)


PACKED = [
    pytest.param(Layout(pp=2, dp_shard=2, checkpointing="full"), marks=pytest.mark.long(40)),
    *(
        pytest.param(layout, marks=pytest.mark.soak)
        for layout in (
            Layout(),
            Layout(tp=2, micro_batch=4, checkpointing="selective"),
            Layout(dp_replicate=2, dp_shard=2, micro_batch=2),
            Layout(pp=2, stages_per_rank=2, schedule="interleaved", micro_batch=2),
            Layout(pp=2, stages_per_rank=2, schedule="zero_bubble", micro_batch=2, reshard_after_forward=False),
            Layout(pp=2, stages_per_rank=2, schedule="dualpipev", checkpointing="full", reshard_after_forward=False),
        )
    ),
]


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("layout", PACKED, ids=str)
def test_packed_documents_train_as_each_of_them_alone(layout: Layout, ranks: Ranks, reference: Trained) -> None:
    alone = train_in_one_process(draw_batch(document_tokens=12))
    assert abs(alone.losses[0] - reference.losses[0]) > 1e-4
    assert_same_training(ranks.train(replace(layout, global_batch=BATCH), document_tokens=12), alone)


@pytest.mark.soak
def test_packed_documents_train_alike_in_compiled_blocks(ranks: Ranks) -> None:
    layout = Layout(tp=2, micro_batch=4, checkpointing="selective", global_batch=BATCH)
    alone = train_in_one_process(draw_batch(document_tokens=12))
    assert_same_training(ranks.train(layout, compiled=True, document_tokens=12), alone)


COMPILED = [
    Layout(dp_shard=2, micro_batch=4, checkpointing="selective"),
    Layout(tp=2, micro_batch=4),
    Layout(tp=2, dp_shard=2, micro_batch=4),
    Layout(tp=2, micro_batch=4, checkpointing="full"),
    Layout(tp=2, micro_batch=4, checkpointing="selective"),
    Layout(cp=2, micro_batch=4, checkpointing="selective"),
    Layout(cp=2, micro_batch=4, checkpointing="selective_up"),
    Layout(cp=2, cp_method="ring", micro_batch=4),
    Layout(pp=2, micro_batch=4),
]


@pytest.mark.soak
@pytest.mark.parametrize("layout", [replace(layout, global_batch=BATCH) for layout in COMPILED], ids=str)
def test_every_compiled_layout_trains_like_one_process(layout: Layout, ranks: Ranks, reference: Trained) -> None:
    assert_same_training(ranks.train(layout, compiled=True), reference)
    if layout.tp * layout.cp == 1:
        assert_same_training(ranks.train(layout, compiled=True, block="manual"), reference)


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize(
    ("degree", "saved"),
    [
        ("cp", ("allgather_base", "reduce_scatter_base")),
        pytest.param("tp", ("reduce_scatter_tensor_coalesced",), marks=pytest.mark.soak),
    ],
)
def test_selective_recomputation_repeats_no_saved_collective(
    degree: str, saved: tuple[str, ...], ranks: Ranks, reference: Trained
) -> None:
    """A block is one graph with its collectives inside, without recomputation and with it."""
    plain = Layout(global_batch=BATCH, micro_batch=4, **{degree: 2})  # type: ignore[arg-type]
    none, selective = (
        ranks.train(layout, compiled=True, backend="aot_eager")
        for layout in (plain, replace(plain, checkpointing="selective"))
    )
    assert_same_training(selective, reference)
    assert selective[0].graphs == none[0].graphs > 0
    for name in saved:
        assert selective[0].calls[f"calls_{name}"] == none[0].calls[f"calls_{name}"] > 0


def test_a_block_compiles_as_one_graph_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph break would be measured as the layout's own time."""
    graphs: list[GraphModule] = []

    def run_eagerly(graph: GraphModule, _: list[Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    stage = build_compiled(monkeypatch, run_eagerly, schedule="zero_bubble")  # its blocks are compiled whole
    stage(tokens()[:, :-1])
    assert len(graphs) == 1
    stage.blocks["0"].attention = torch.compiler.disable(causal_attention)
    with pytest.raises(RuntimeError, match=r"torch\.compiler\.disable"):
        stage(tokens()[:, :-1])


@pytest.mark.parametrize(
    ("shape", "number", "checkpointing", "repeated"),
    [
        (SHAPE, 4, "none", 0),
        (SHAPE, 4, "selective", 1),
        (SHAPE, 5, "selective_up", 1),
        (SHAPE, 4, "full", 3),
        (GPT_OSS, 2, "selective", 1),
    ],
)
def test_no_product_is_repeated_that_the_backward_pass_does_not_read(
    shape: Model, number: int, checkpointing: Any, repeated: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block has four, five with selective_up, or two of experts, of which the last one gives its output."""
    products: list[int] = []
    product = (torch.ops.gpu_sweeper.multiply_groups if shape.experts else torch.ops.aten.mm).default

    def count(graph: GraphModule, _: list[Tensor]) -> Any:
        products.append(sum(node.target is product for node in graph.graph.nodes))
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=count, partition_fn=min_cut_rematerialization_partition)
    stage = build_compiled(monkeypatch, backend, shape, checkpointing=checkpointing)
    stage(tokens()[:, :-1]).sum().backward()
    assert set(products) == {number, 2 * number + repeated}  # of forward and of backward passes


def build_compiled(monkeypatch: pytest.MonkeyPatch, backend: Any, shape: Model = SHAPE, **fields: Any) -> Stage:
    torch.compiler.reset()
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend=backend))
    layout = Layout(micro_batch=BATCH, global_batch=BATCH, **fields)
    with process_group(Rank(), CPU):
        spec, groups = ModelSpec(shape, LENGTH, torch.float32, compiled=True), build_groups(layout, "cpu")
        (stage,) = build_stages(spec, layout, groups, CPU, build_initializer(0, CPU))
    return stage
