"""The rules that make a layout valid, and the stages of a pipeline's ranks."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import examples
from tests.support.planner import trained_job
from workloads.estimator.pipeline import stage_layers
from workloads.layouts.layout import DEGREES, Job, Layout, State
from workloads.layouts.rules import Site, Violation, find_violation
from workloads.models.model import MODELS
from workloads.parallel import TORCH_VERSION, BlockKind

POWERS_OF_TWO = [1, 2, 4, 8]


def violation_of(job: Job, ranks_per_node: int = 8, **site: Any) -> Violation | None:
    return find_violation(job, Site(job.layout.gpus, ranks_per_node, torch=TORCH_VERSION, **site))


def is_valid(job: Job, ranks_per_node: int = 8, ranks: int | None = None) -> bool:
    """The rules a second time, written as one condition."""
    layout, shape, length = job.layout, job.model, job.sequence_length
    dp = layout.dp_replicate * layout.dp_shard
    microbatches = layout.global_batch / (layout.micro_batch * dp)
    is_split, is_v = layout.schedule in ("zero_bubble", "zbv", "dualpipev"), layout.schedule in ("zbv", "dualpipev")
    schedule_fits = (layout.schedule == "1f1b") == (layout.stages_per_rank == 1)
    schedule_fits = schedule_fits and (not is_v or layout.stages_per_rank == 2)
    is_pipeline, is_in_rounds = layout.pp > 1, layout.schedule in ("interleaved", "zero_bubble")
    uses_fsdp = dp * layout.cp > 1 or job.state == "fp32"
    return (
        dp * layout.tp * layout.cp * layout.pp == (ranks or layout.gpus)
        and shape.heads % layout.tp == shape.kv_heads % layout.tp == 0
        and shape.intermediate_size % layout.tp == shape.vocabulary % layout.tp == 0
        and (length // layout.cp) % layout.tp == 0
        and layout.tp <= ranks_per_node
        and (layout.cp == 1 or length % (2 * layout.cp) == 0)
        and microbatches == int(microbatches)
        and layout.pp * layout.stages_per_rank <= shape.layers
        and (schedule_fits if is_pipeline else (layout.stages_per_rank, layout.schedule) == (1, "1f1b"))
        and (not is_pipeline or microbatches >= layout.pp)
        and (not is_pipeline or not is_in_rounds or microbatches % max(1, microbatches // layout.pp) == 0)
        and (layout.schedule != "dualpipev" or microbatches >= 2 * layout.pp)
        and (layout.reshard_after_forward or layout.dp_shard * layout.cp > 1 or job.state == "fp32")
        and (not is_split or not (layout.reshard_after_forward and uses_fsdp))
        and not (shape.tied and is_pipeline)
        and (not job.manual_backward or (layout.tp == layout.cp == 1 and not is_split))
    )


@examples(300)
@given(
    st.fixed_dictionaries(
        {name: st.sampled_from([1, 2, 3, 4]) for name in (*DEGREES, "stages_per_rank", "micro_batch")}
    ),
    st.sampled_from(["1f1b", "interleaved", "zero_bubble", "zbv", "dualpipev"]),
    st.booleans(),
    st.sampled_from([6, 8, 12]),
    st.sampled_from(["llama_tiny", "llama3_1b", "llama3_8b", "qwen2_5_7b"]),
    st.sampled_from([512, 6000]),
    st.sampled_from([1, 2, 8]),
    st.sampled_from([("fp32", "pytorch"), ("bf16", "pytorch"), ("fp32", "manual")]),
)
def test_a_layout_is_valid_or_has_a_violated_rule_with_a_reason(
    degrees: dict[str, int],
    schedule: str,
    reshard_after_forward: bool,
    global_batch: int,
    model: str,
    length: int,
    ranks_per_node: int,
    training: tuple[State, BlockKind],
) -> None:
    layout = Layout(
        **degrees,
        schedule=schedule,  # type: ignore[arg-type]
        reshard_after_forward=reshard_after_forward,
        global_batch=global_batch,
    )
    state, block = training
    job = trained_job(layout, MODELS[model], sequence_length=length, state=state, block=block)
    violation = violation_of(job, ranks_per_node)
    assert (violation is None) == is_valid(job, ranks_per_node)
    assert violation is None or (violation.rule and violation.reason)


@pytest.mark.parametrize(
    ("layout", "training", "reason"),
    [
        (Layout(checkpointing="full", checkpointing_freq=32), {}, ""),
        (Layout(checkpointing="full", checkpointing_freq=33), {}, "recomputes none of 32 blocks"),
        (Layout(checkpointing_freq=2), {}, "checkpointing_freq has to be 1"),
        (Layout(tp=2), {"precision": "fp8_tensorwise"}, ""),
        (Layout(tp=2), {"precision": "fp8_rowwise"}, ""),
        (Layout(tp=2), {"precision": "mxfp8"}, "tp has to be 1"),
        (Layout(dp_shard=2), {"precision": "mxfp8", "sequence_length": 8208}, "needs tokens in multiples of 32"),
        (Layout(dp_shard=2, micro_batch=2), {"precision": "mxfp8", "sequence_length": 8208}, ""),
        (Layout(dp_shard=2), {"precision": "nvfp4", "sequence_length": 8256}, "needs tokens in multiples of 128"),
        (Layout(dp_shard=2), {"precision": "nvfp4"}, ""),
        (Layout(dp_shard=2), {"precision": "fp8_tensorwise", "block": "manual"}, ""),
        (Layout(dp_shard=2), {"precision": "fp8_blockwise", "block": "manual"}, ""),
        (Layout(dp_shard=2), {"precision": "fp8_rowwise", "block": "manual"}, "block manual does not train in it"),
        (Layout(dp_shard=2), {"precision": "fp8_blockwise"}, "block pytorch does not train in it"),
        (Layout(dp_shard=2), {"precision": "fp32", "state": "bf16"}, "state has to be fp32"),
        (Layout(dp_replicate=2, reshard_after_forward=False), {"state": "fp32"}, ""),
        (Layout(dp_replicate=2, reshard_after_forward=False), {"state": "bf16"}, "shard no weights in state bf16"),
    ],
)
def test_a_training_is_valid_or_names_what_it_needs(layout: Layout, training: dict[str, Any], reason: str) -> None:
    violation = violation_of(trained_job(replace(layout, global_batch=4), **training))
    assert reason in violation.reason if violation else not reason


def test_fp8_sizes_of_a_rank_are_multiples_of_16() -> None:
    shape = replace(MODELS["llama3_8b"], intermediate_size=14344)
    violation = violation_of(trained_job(Layout(tp=4, global_batch=4), shape, precision="fp8_tensorwise"))
    assert violation and "tp 4 leaves 3586 of intermediate size" in violation.reason


def test_every_valid_layout_of_eight_ranks_is_found() -> None:
    degrees = itertools.product(POWERS_OF_TWO, repeat=5)
    jobs = [trained_job(Layout(*some, global_batch=16)) for some in degrees]
    valid = [job for job in jobs if find_violation(job, Site(8, 8)) is None]
    # The ways to write 8 as a product of five powers of two.
    assert len(valid) == 35 == sum(is_valid(job, ranks=8) for job in jobs)


@given(st.integers(1, 100), st.integers(1, 100))
def test_stages_have_every_layer_once_and_differ_by_at_most_one(layers: int, stages: int) -> None:
    stage_ranges = stage_layers(layers, min(stages, layers))
    assert [layer for stage in stage_ranges for layer in stage] == list(range(layers))
    assert max(map(len, stage_ranges)) - min(map(len, stage_ranges)) <= 1


@pytest.mark.parametrize(
    ("layers", "less", "sizes"),
    [
        (61, (0, 3), [16, 16, 16, 13]),
        (62, (1, 1), [15, 16, 16, 15]),
        (32, (1, 1), [8, 9, 8, 7]),  # torchtitan's default: generate_llm_fqn_per_model_part(4, 32, 1, 1)
        (33, (-2, 1), [10, 8, 8, 7]),
    ],
)
def test_the_ends_have_fewer_layers(layers: int, less: tuple[int, int], sizes: list[int]) -> None:
    stages = stage_layers(layers, 4, *less)
    assert list(map(len, stages)) == sizes and stages[-1].stop == layers


@given(st.sampled_from(["1f1b", "interleaved", "zbv"]), st.integers(1, 8), st.integers(1, 3))
def test_every_stage_is_on_one_rank_and_the_ends_of_a_v_are_on_the_first(
    schedule: str, pp: int, stages_per_rank: int
) -> None:
    layout = Layout(pp=pp, stages_per_rank=2 if schedule == "zbv" else stages_per_rank, schedule=schedule)  # type: ignore[arg-type]
    stages = [layout.list_stages(rank) for rank in range(pp)]
    assert sorted(itertools.chain(*stages)) == list(range(layout.stages))
    assert schedule != "zbv" or stages[0] == [0, layout.stages - 1]


@pytest.mark.parametrize(
    ("fields", "setting", "reason"),
    [
        ({"tp": 2, "tp_overlap": "async"}, {}, ""),
        ({"dp_shard": 2, "tp_overlap": "async"}, {}, "tp 1 has no collectives"),
        ({"tp": 2, "tp_overlap": "async"}, {"compiled": False}, "compile has to be true"),
        ({"tp": 2, "tp_overlap": "async"}, {"on_gpu": False}, "on a CPU it has to be false"),
        ({"tp": 2, "tp_overlap": "async"}, {"ranks_per_node": 1, "tp_across_domains": True}, "GPUs of one node"),
        ({"cuda_graph": True}, {"state": "bf16"}, ""),
        ({"cuda_graph": True}, {}, "state has to be bf16"),
        ({"cuda_graph": True}, {"state": "bf16", "on_gpu": False}, "on a CPU it has to be false"),
        ({"dp_shard": 2, "cuda_graph": True}, {"state": "bf16"}, "it needs one rank, these are 2"),
        ({"dp_shard": 2}, {"document_tokens": 512}, ""),
        ({"cp": 2}, {"document_tokens": 512}, "cp has to be 1"),
        ({"dp_shard": 2}, {"document_tokens": 512, "block": "manual"}, "needs block pytorch"),
        ({"dp_shard": 2}, {"document_tokens": 512, "precision": "fp32"}, "half precision"),
        ({"dp_shard": 2}, {"document_tokens": 512, "precision": "fp32", "on_gpu": False}, ""),
        ({"dp_shard": 2, "cp_method": "ring"}, {}, "cp_method has to be allgather"),
        ({"cp": 2, "cp_method": "ring"}, {}, ""),
        ({"cp": 2, "checkpointing": "selective_up"}, {}, ""),
        ({"tp": 2, "checkpointing": "selective_up"}, {}, "tp has to be 1"),
        ({"checkpointing": "selective_up"}, {"model": MODELS["experts_tiny"]}, "needs gated MLPs"),
        ({"checkpointing": "selective_up"}, {"model": MODELS["nemotron4_15b"]}, "needs gated MLPs"),
        (
            {"checkpointing": "selective_up"},
            {"model": replace(MODELS["llama3_8b"], intermediate_size=4096)},
            "does not know gate",
        ),
        (
            {"dp_shard": 2, "checkpointing": "selective_up"},
            {"precision": "fp8_tensorwise"},
            "does not divide fp8",
        ),
        ({"dp_shard": 2, "checkpointing": "selective_up"}, {"precision": "fp8_tensorwise", "block": "manual"}, ""),
    ],
)
def test_what_a_layout_cannot_do_is_refused_with_the_reason(
    fields: dict[str, Any], setting: dict[str, Any], reason: str
) -> None:
    fields = {"global_batch": 16} | fields
    names = ("on_gpu", "ranks_per_node", "tp_across_domains")
    site = {"ranks_per_node": 2} | {name: value for name, value in setting.items() if name in names}
    training = {"compiled": True} | {name: value for name, value in setting.items() if name not in names}
    violation = violation_of(trained_job(Layout(**fields), **training), **site)
    assert (violation is None) == (not reason)
    assert violation is None or reason in violation.reason
