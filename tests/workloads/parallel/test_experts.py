"""Mixtures of experts in `workload=parallel`: layouts, compilation, routing, and trials on a CPU and a GPU."""

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.parallel_ranks import (
    BATCH,
    GPT_OSS,
    LENGTH,
    Ranks,
    assert_same_training,
    draw_batch,
    train_in_one_process,
)
from workloads.api.contract import Infeasible, Machine, Measurement, Rank
from workloads.api.trial import run_trial
from workloads.layouts.layout import Layout
from workloads.llama.model import Block
from workloads.models.model import MODELS
from workloads.models.routing import Routing, tokens_of_experts
from workloads.parallel import Parallel, ParallelParameters, run
from workloads.parallel.stage import build_initializer

SHAPE = replace(MODELS["experts_tiny"], layers=4)
TRIAL = {"model": "experts_tiny", "sequence_length": 64, "global_batch": 8, "learning_rate": 3e-3, "steps": 6}
LAYOUTS = [
    Layout(cp=2, micro_batch=4, checkpointing="full", global_batch=BATCH),
    Layout(dp_shard=4, ep=2, micro_batch=2, checkpointing="selective", global_batch=BATCH),
    Layout(dp_shard=2, tp=2, ep=4, micro_batch=4, checkpointing="selective", global_batch=BATCH),
    *(
        pytest.param(layout, marks=pytest.mark.soak)
        for layout in (
            Layout(dp_replicate=2, cp=2, checkpointing="full", global_batch=BATCH),
            Layout(dp_shard=2, micro_batch=2, checkpointing="selective", global_batch=BATCH),
            Layout(pp=2, micro_batch=2, global_batch=BATCH),
            Layout(dp_shard=4, ep=4, global_batch=BATCH),
            Layout(dp_replicate=2, dp_shard=2, ep=2, checkpointing="full", global_batch=BATCH),
            Layout(pp=2, cp=2, ep=2, micro_batch=2, global_batch=BATCH),
            Layout(tp=2, micro_batch=2, checkpointing="full", reshard_after_forward=False, global_batch=BATCH),
            Layout(tp=2, micro_batch=4, sharding="none", global_batch=BATCH),  # without FSDP
            Layout(dp_replicate=2, dp_shard=2, tp=2, ep=2, micro_batch=2, global_batch=BATCH),
            Layout(pp=2, tp=2, ep=2, micro_batch=2, global_batch=BATCH),
            Layout(cp=2, tp=2, ep=4, micro_batch=2, global_batch=BATCH),
        )
    ),
]


def test_biases_and_sinks_are_zeros_at_the_start() -> None:
    initialize = build_initializer(0, torch.device("cpu"))
    with torch.device("meta"):
        sizes = {name: tuple(parameter.shape) for name, parameter in Block(GPT_OSS).named_parameters()}
    zeros = {name for name, size in sizes.items() if not initialize(f"blocks.0.{name}", size).any()}
    assert zeros == {name for name in sizes if "bias" in name or name == "sinks"} and len(zeros) == 6


def train(device: str = "cpu", **changes: Any) -> Measurement:
    # Collections at set steps, which tests/workloads/parallel/test_run.py has, search all that pytest has imported.
    fixed = {"dtype": "fp32", "compile": False, "gc_freq": 0} if device == "cpu" else {}
    return run_trial("parallel", {**TRIAL, **fixed, **changes}, Rank(device=device))


@pytest.mark.long(10)
@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout_trains_like_one_process(layout: Layout, ranks: Ranks) -> None:
    reference = train_in_one_process(draw_batch(), SHAPE)
    state = "bf16" if layout.sharding == "none" else "fp32"
    assert_same_training(ranks.train(layout, shape=SHAPE, state=state), reference)


@pytest.mark.long(10)
@pytest.mark.xdist_group("ranks")
def test_a_compiled_block_is_one_graph_and_computes_the_same(ranks: Ranks) -> None:
    layout = Layout(checkpointing="selective", micro_batch=2, global_batch=BATCH)
    routing = Routing(auxiliary_loss=0.01, z_loss=0.001)
    plain, compiled = (
        ranks.train(layout, shape=SHAPE, routing=routing, compiled=is_compiled, backend="aot_eager")
        for is_compiled in (False, True)
    )
    assert_same_training(compiled, plain[0])
    assert compiled[0].graphs == 2  # of the dense first block, and of the blocks with experts


@pytest.mark.long(10)
@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize(("pp", "compiled"), [(2, False), pytest.param(1, True, marks=pytest.mark.soak)])
def test_tensor_parallel_ranks_route_their_tokens_as_one_rank_does(pp: int, compiled: bool, ranks: Ranks) -> None:
    """The norms of queries and keys span the heads of both ranks. Biases of experts follow the loads of both."""
    shape, routing = replace(MODELS["qwen3_moe_tiny"], qk_norm="all"), Routing(z_loss=0.01, bias_rate=0.2)
    (one,) = ranks.train(Layout(micro_batch=4, global_batch=BATCH), shape=shape, routing=routing)
    layout = Layout(tp=2, pp=pp, micro_batch=4, global_batch=BATCH, checkpointing="none" if pp == 1 else "full")
    divided = ranks.train(layout, shape=shape, routing=routing, compiled=compiled, backend="aot_eager")
    assert_same_training(divided, one)
    assert divided[0].graphs == compiled


@pytest.mark.long(10)
@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("degree", ["tp", pytest.param("dp_shard", marks=pytest.mark.soak)])
def test_divided_and_compiled_blocks_of_gpt_oss_train_like_one_process(degree: str, ranks: Ranks) -> None:
    layout = Layout(**{degree: 2}, ep=2, checkpointing="selective", micro_batch=2, global_batch=BATCH)
    trained = ranks.train(layout, shape=GPT_OSS, compiled=True, backend="aot_eager")
    assert_same_training(trained, train_in_one_process(draw_batch(), GPT_OSS))
    assert trained[0].graphs == 2  # with a window and without


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_bytes(bytes(range(256)) * 24)
    return str(path)


@pytest.mark.parametrize("imbalance", [None, 1.0, 3.5])
def test_a_trial_trains_and_records_the_imbalance_as_executed(imbalance: float | None, text: str) -> None:
    """Natural routing is that of a file's tokens."""
    measured = train(imbalance=imbalance, data=None if imbalance else text)
    assert measured.metrics["loss"] < measured.metrics["first_loss"] - 0.3
    assert measured.executed["imbalance"] == imbalance
    assert (
        measured.metrics["executed_imbalance"] == pytest.approx(imbalance, abs=0.01)
        if imbalance
        else (1.1 < measured.metrics["executed_imbalance"] < 4)
    )
    assert measured.machine_info["parameters_kept"] == MODELS["experts_tiny"].parameters
    parts = ("permutation", "experts") if imbalance else ("router", "permutation", "experts")
    assert all(0 < measured.metrics[f"{part}_share"] < 0.5 for part in parts)


@pytest.mark.xdist_group("ranks")
def test_a_rank_counts_the_tokens_of_its_experts(ranks: Ranks) -> None:
    layout = Layout(dp_shard=2, ep=2, micro_batch=2, global_batch=BATCH)
    trained = ranks.train(layout, shape=SHAPE, routing=Routing(imbalance=3.0))
    choices = 2 * LENGTH * SHAPE.experts_per_token  # of a rank's micro-batch; each block has its own busy experts
    loads = [tokens_of_experts(choices, SHAPE.experts, 3.0, seed=layer) for layer in range(SHAPE.layers)]
    first = [
        2 * sum(loads[layer][: SHAPE.experts // 2]) / choices
        for layer in range(SHAPE.layers)
        if SHAPE.has_experts(layer)
    ]
    assert trained[0].rank_imbalances == pytest.approx(first) and max(first) > 1.05
    assert trained[1].rank_imbalances == pytest.approx([2 - share for share in first])


def test_a_file_with_too_few_tokens_is_refused(text: str) -> None:
    with pytest.raises(Infeasible, match="has 6144 tokens, but 160 sequences of 65 need 10400"):
        train(data=text, steps=18)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "llama_tiny", "imbalance": 2.0}, "imbalance=2.0: llama_tiny has no experts"),
        ({"imbalance": 5.0}, "imbalance=5: no expert has a token twice, so it is at most 4"),
        ({"layers": 1, "imbalance": 2.0}, "imbalance=2.0: experts_tiny has no experts in its first 1 layers"),
        ({"layers": 3}, "layers=3: experts_tiny has 2"),
        ({"model": "deepseek_v3"}, "model=deepseek_v3: 'deepseek_v3' is not trained here. Available: llama_tiny"),
        ({"model": "gpt_oss_20b", "document_tokens": 8}, "document_tokens=8: attention with sinks has no documents"),
        ({"data": "text.txt", "document_tokens": 8}, "document_tokens=8: sequences of data are one document"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_runs(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ParallelParameters(**({"model": "experts_tiny"} | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tp": 4}, "tp 4 does not divide 2 key-value heads"),
        ({"tp": 2, "async_tp": True}, "async_tp was not run with experts"),
        ({"model": "gpt_oss_20b", "cp": 2}, "cp 2 does not divide attention with sinks and windows here"),
        ({"ep": 2}, "ep 2 does not divide the 1 GPUs of a pipeline rank"),
        ({"dp_replicate": 2, "ep": 2, "global_batch": 2}, "ep 2 has to be a divisor of dp_shard x cp x tp = 1"),
        ({"block": "manual"}, "block manual has no experts"),
        ({"dtype": "fp8_rowwise"}, "experts have no products in fp8_rowwise here"),
        ({"dtype": "fp32"}, "grouped products of a GPU are in bf16"),
    ],
)
def test_what_experts_do_not_support_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    parameters = ParallelParameters(**({"model": "experts_tiny", "sequence_length": LENGTH} | changes))
    violation = parameters.find_violation(Machine("gpu", "sm90", parameters.layout.gpus, 8))
    assert violation is not None and message in violation.reason


def test_a_result_says_which_routing_it_has() -> None:
    recorded = [
        Parallel().recorded_parameters(ParallelParameters(model=model, imbalance=imbalance))["imbalance"]
        for model, imbalance in (("experts_tiny", None), ("experts_tiny", 1.0), ("llama_tiny", None))
    ]
    assert recorded == ["natural", 1.0, None]
    assert "imbalance" in Parallel.work  # of which results of different values are never ranked together


def test_a_model_reduced_in_depth_keeps_its_first_blocks() -> None:
    shape = ParallelParameters(model="experts_tiny", layers=1).shape
    assert (shape.layers, shape.dense_layers, shape.experts) == (1, (0,), 0)
    assert "executed_imbalance" not in train(layers=1, steps=1).metrics


def test_a_rank_without_experts_adds_nothing_to_the_imbalance(monkeypatch: pytest.MonkeyPatch) -> None:
    def add_the_other_rank(total: torch.Tensor, *_: Any) -> None:
        if total.numel() == 2:
            assert total.dtype == torch.float32  # as on a rank that has experts
            total += torch.tensor([3.2, 2.0])
        else:
            total += torch.tensor([0.0, 1.2, 2.5])  # of a block without experts, a block with experts, and the worst

    monkeypatch.setattr(run.dist, "all_reduce", add_the_other_rank)
    stages = [SimpleNamespace(experts={})]
    measured = run._measure_imbalance(SimpleNamespace(stages=stages), 2, torch.device("cpu"))
    assert measured == pytest.approx({"executed_imbalance": 1.6, "worst_imbalance": 2.5, "rank_imbalance": 1.2})


GPU_TRIAL = {"model": "olmoe_1b_7b", "layers": 2, "sequence_length": 1024, "global_batch": 4, "micro_batch": 2}


@pytest.fixture(scope="module")
def plain_on_a_gpu() -> Measurement:
    return train("cuda", compile=False)


@pytest.mark.gpu
@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_gpu_trains_alike_however_a_block_runs(
    compiled: bool, checkpointing: str, plain_on_a_gpu: Measurement
) -> None:
    plain, other = plain_on_a_gpu.metrics, train("cuda", checkpointing=checkpointing, compile=compiled).metrics
    assert plain["loss"] < plain["first_loss"] - 0.3
    assert other["loss"] == pytest.approx(plain["loss"], abs=0.02)  # first weights are those of a device's generator
    assert other["gradient_norm"] == pytest.approx(plain["gradient_norm"], rel=0.05)


@pytest.mark.gpu
@pytest.mark.parametrize("imbalance", [None, 1.0, 4.0])
def test_a_gpu_trains_a_published_model_reduced_in_depth(imbalance: float | None) -> None:
    measured = train("cuda", **GPU_TRIAL, imbalance=imbalance, learning_rate=1e-5, state="bf16")
    assert measured.executed["imbalance"] == imbalance
    assert measured.metrics["first_loss"] == pytest.approx(math.log(50304), abs=0.8)
    assert measured.metrics["loss"] == pytest.approx(measured.metrics["first_loss"], abs=0.2)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("imbalance", "compiled", "degrees"),
    [
        (None, False, {"ep": 2}),
        (1.0, False, {"ep": 2}),
        (None, True, {"ep": 2}),
        (None, True, {"dp_shard": 1, "tp": 2, "ep": 2}),
        (None, False, {"dp_shard": 1, "tp": 2}),
    ],
    ids=["natural", "forced", "compiled", "tp", "tp, whole experts"],
)
def test_experts_divided_over_two_gpus_train_as_whole_ones_do(
    imbalance: float | None, compiled: bool, degrees: dict[str, int], gpus: Ranks
) -> None:
    layout = Layout(dp_shard=2, micro_batch=2, checkpointing="selective", global_batch=BATCH)
    # Of each kind of block one: compiling takes most of the time.
    fields = {"shape": replace(SHAPE, layers=2), "routing": Routing(imbalance), "dtype": torch.bfloat16}
    (whole, _), divided = (
        gpus.train(layout, **fields),
        gpus.train(replace(layout, **degrees), **fields, compiled=compiled),
    )
    for rank in divided:
        assert rank.losses == pytest.approx(whole.losses, abs=0.02)
        assert rank.norm == pytest.approx(whole.norm, rel=0.05)


@pytest.mark.gpu
def test_a_cuda_graph_has_the_losses_of_the_same_steps_without() -> None:
    plain, graphed = (
        train("cuda", **GPU_TRIAL, imbalance=1.0, state="bf16", cuda_graph=graph) for graph in (False, True)
    )
    assert graphed.metrics["loss"] == pytest.approx(plain.metrics["loss"], abs=0.02)


@pytest.mark.parametrize(
    ("model", "ep", "imbalance", "expected"),
    [
        ("experts_tiny", 1, 4.0, 1.0),
        ("experts_tiny", 2, None, 1.0),
        ("qwen3_30b_a3b", 2, 1.0, 1.0),  # 128 experts do not divide a million tokens
        ("experts_tiny", 4, 4.0, (1.0, 4.0)),
    ],
)
def test_the_busiest_rank_has_the_tokens_of_its_experts(
    model: str, ep: int, imbalance: float | None, expected: Any
) -> None:
    parameters = ParallelParameters(model=model, dp_shard=ep, ep=ep, imbalance=imbalance)
    if isinstance(expected, float):
        assert parameters.rank_imbalance == expected
    else:
        assert expected[0] < parameters.rank_imbalance < expected[1]
