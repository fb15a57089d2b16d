"""Invalid jobs are refused with a reason that has their numbers."""

from dataclasses import replace
from typing import Any

import pytest

from tests.support.planner import LLAMA_8B, cluster, job
from workloads.layouts.layout import Layout
from workloads.layouts.rules import find_violation
from workloads.layouts.trainers import find_trainer


@pytest.mark.parametrize(
    ("layout", "gpus", "reason"),
    [
        (Layout(dp_shard=4, global_batch=8), 8, "= 4 ranks, but there are 8"),
        (Layout(tp=16, global_batch=8), 16, "tp 16 does not divide 8 key-value heads"),
        (Layout(tp=8, global_batch=8), 8, "tp 8 does not fit in a domain of 4 GPUs"),
        (Layout(cp=3, global_batch=8), 3, "cp 3 needs a sequence length divisible by 6"),
        (Layout(dp_shard=8, global_batch=12), 8, "global batch 12 is not a multiple of micro-batch 1 x data"),
        (Layout(pp=64, global_batch=64), 64, "64 stages, but the model has 32 layers"),
        (Layout(pp=4, schedule="interleaved", global_batch=8), 4, "interleaved needs stages_per_rank above 1"),
        (Layout(pp=4, schedule="zbv", stages_per_rank=4, global_batch=8), 4, "zbv needs stages_per_rank 2"),
        (Layout(schedule="zbv", stages_per_rank=2, global_batch=8), 1, "pp 1 is not a pipeline"),
        (Layout(pp=4, global_batch=2), 4, "2 micro-batches do not fill a pipeline of 4 ranks"),
        (Layout(ep=2, dp_shard=2, global_batch=2), 2, "ep 2: the model has no experts"),
        (Layout(dp_shard=2, sharding="none", global_batch=2), 2, "but sharding is none"),
        (Layout(reshard_after_forward=False), 1, "reshard_after_forward has to be true"),
    ],
)
def test_a_broken_rule_is_named(layout: Layout, gpus: int, reason: str) -> None:
    violation = find_violation(replace(job(layout), trainer="torchtitan"), cluster(gpus, gpus_per_domain=4))
    assert violation is not None and reason in violation.reason


@pytest.mark.parametrize(
    ("trainer", "kv_heads", "reason"),
    [
        *((trainer, 2, "") for trainer in ("megatron", "megatron-bridge", "nemo", "primus")),
        ("megatron", 3, "tp 4 does not divide 3 key-value heads, nor is it a multiple of them"),
        *(
            (trainer, 2, "tp 4 does not divide 2 key-value heads")
            for trainer in ("torchtitan", "nemo-automodel", "own")
        ),
    ],
)
def test_ranks_share_a_key_value_head_where_the_trainer_lets_them(trainer: str, kv_heads: int, reason: str) -> None:
    heads = replace(LLAMA_8B, heads=24, head_size=128, kv_heads=kv_heads)
    shared = replace(job(Layout(tp=4, global_batch=8), heads), trainer=trainer)
    violation = find_violation(shared, cluster(4))
    assert (violation.reason if violation else "") == reason


def test_automodel_has_pipelines_with_fsdp2_alone() -> None:
    trainer = find_trainer("automodel")
    assert not trainer.find_unsupported({"pp": 4, "schedule": "zbv", "sharding": "fsdp2"})
    assert "pp=4: nemo-automodel does not run it with sharding=megatron_fsdp" in trainer.find_unsupported(
        {"pp": 4, "sharding": "megatron_fsdp"}
    )


def test_rules_of_one_trainer_have_the_numbers_of_its_source() -> None:
    """Of torchtitan 0.2.2 and prime-rl 0.8.1; each layout is valid for Megatron-LM."""
    experts = replace(LLAMA_8B, experts=8, experts_per_token=2, expert_intermediate_size=512)
    cases = [
        ("torchtitan", Layout(dp_shard=2, tp=4, global_batch=8), 8188, LLAMA_8B, "length divisible by 8, 8188 is not"),
        ("torchtitan", Layout(dp_replicate=4, tp=2, global_batch=8), 8192, LLAMA_8B, "does not combine with tp or pp"),
        ("torchtitan", Layout(dp_shard=4, pp=2, global_batch=8), 8192, replace(LLAMA_8B, tied=True), "in one stage"),
        ("prime-rl", Layout(dp_shard=4, cp=2, ep=1, global_batch=8), 8192, experts, ""),
        (
            "prime-rl",
            Layout(dp_shard=2, cp=4, ep=2, global_batch=8),
            8192,
            experts,
            "ep 2 has to be a multiple of cp 4",
        ),
        ("prime-rl", Layout(dp_replicate=4, dp_shard=2, ep=4, global_batch=8), 8192, experts, "divisor of dp_shard x"),
    ]
    for trainer, layout, length, model, reason in cases:
        described = replace(job(layout, model), sequence_length=length, trainer=trainer)
        violation = find_violation(described, cluster(8))
        assert violation is None if not reason else violation is not None and reason in violation.reason
        layout = replace(layout, sharding="none", dp_shard=1, dp_replicate=layout.dp)
        assert find_violation(replace(described, trainer="megatron", layout=layout), cluster(8)) is None


def test_what_is_not_modelled_of_a_trainer_is_not_called_missing() -> None:
    for trainer in ("deepspeed", "llm-foundry"):
        assert f"tp=2: {trainer} is planned without it" in find_trainer(trainer).find_unsupported({"tp": 2})
    for trainer in ("megatron-bridge", "nemo"):
        assert not find_trainer(trainer).find_unsupported({"sharding": "fsdp2"})
    assert not find_trainer("primus").find_unsupported({"sharding": "fsdp2", "dp_replicate": 2})
    assert find_trainer("megatron").find_unsupported({"sharding": "fsdp2", "dp_replicate": 2})


def test_a_rule_that_differs_between_trainers_is_a_row_of_each() -> None:
    """Megatron's interleaved schedule needs rounds of as many micro-batches as ranks, PyTorch's equal rounds."""
    interleaved = job(Layout(pp=4, schedule="interleaved", stages_per_rank=2, global_batch=6, sharding="none"))
    interleaved = replace(interleaved, state="bf16")
    violation = find_violation(replace(interleaved, trainer="megatron_lm"), cluster(4))
    assert violation is not None and "a multiple of 4 micro-batches, 6 is not" in violation.reason
    for trainer in ("own", "torchtitan", "nemo-automodel"):
        assert find_violation(replace(interleaved, trainer=trainer), cluster(4)) is None
    nine = replace(interleaved, layout=replace(interleaved.layout, global_batch=9))
    violation = find_violation(nine, cluster(4))
    assert violation is not None and "a multiple of 2 micro-batches, 9 is not" in violation.reason


@pytest.mark.parametrize(("trainer", "sharding", "stages"), [("primus", "zero1", 1), ("torchtitan", "fsdp2", 2)])
def test_zero_bubble_has_the_stages_that_its_trainer_gives_a_rank(trainer: str, sharding: Any, stages: int) -> None:
    for per_rank in (1, 2):
        layout = Layout(dp_shard=2, pp=4, schedule="zero_bubble", stages_per_rank=per_rank, global_batch=16)
        layout = replace(layout, sharding=sharding)
        violation = find_violation(replace(job(layout), trainer=trainer), cluster(8))
        assert (violation is None) == (per_rank == stages)


def test_experts_are_divided_among_the_gpus_of_a_pipeline_rank() -> None:
    experts = replace(LLAMA_8B, experts=12, experts_per_token=2, expert_intermediate_size=512)
    layout = Layout(dp_shard=4, pp=2, ep=8, global_batch=8)
    messages = [(8, "ep 8 does not divide 12 experts"), (3, "ep 3 does not divide the 4 GPUs of a pipeline rank")]
    for ep, message in messages:
        violation = find_violation(replace(job(replace(layout, ep=ep)), model=experts), cluster(8))
        assert violation is not None and violation.reason == message
    assert find_violation(replace(job(replace(layout, ep=4)), model=experts), cluster(8)) is None


def test_a_data_type_without_units_is_refused() -> None:
    layout = Layout(dp_shard=2, global_batch=2)
    violation = find_violation(replace(job(layout), precision="nvfp4", trainer="torchtitan"), cluster(2))
    assert violation is not None and "h100 has no fp4 units" in violation.reason
