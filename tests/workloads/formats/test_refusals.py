"""What a trainer's file lacks, or what a text does not say, is refused by name."""

from dataclasses import replace

import pytest

from tests.support.formats import LLAMA, example
from workloads.api.errors import UserInputError
from workloads.formats.files import read_layout, render


@pytest.mark.parametrize(
    ("trainer", "values", "message"),
    [
        (
            "torchtitan",
            {"checkpointing": "core_attention"},
            "torchtitan: checkpointing=core_attention cannot be written",
        ),
        ("torchtitan", {"sharding": "zero1"}, "torchtitan: sharding=zero1 cannot be written"),
        ("torchtitan", {"offload_optimizer": True}, "torchtitan: offload_optimizer=true cannot be written"),
        ("torchtitan", {"sequence_parallel": False}, "torchtitan: tp 2 of torchtitan divides the sequence"),
        ("torchtitan", {"dp_shard": 1, "dp_replicate": 4}, "torchtitan: dp_replicate without dp_shard or cp is DDP"),
        ("torchtitan", {"document_tokens": 512}, "torchtitan: document_tokens=512 cannot be written"),
        (
            "nemo",
            {"schedule": "zbv", "pp": 2, "dp_shard": 2, "stages_per_rank": 2},
            "nemo (Megatron-Bridge): schedule=zbv",
        ),
        ("megatron", {"model": replace(LLAMA, qk_norm="all")}, "megatron: the model's qk_norm=all cannot be written"),
        *(
            (
                trainer,
                {"model": replace(LLAMA, **{name: value})},
                f"{label}: the model's {name}={value} cannot be written",
            )  # type: ignore[arg-type]
            for trainer, label in (("megatron", "megatron"), ("nemo", "nemo (Megatron-Bridge)"), ("primus", "primus"))
            for name, value in (("kv_rank", 512), ("linear_in", 64), ("prediction_layers", 1))
        ),
        (
            "megatron",
            {"model": replace(LLAMA, attention_gate=True)},
            "megatron: the model's attention_gate=true cannot be",
        ),
        ("megatron", {"state": "amp"}, "megatron: state=amp cannot be written. Supported: fp32"),
        ("megatron", {"checkpointing": "norm_act"}, "megatron: checkpointing=norm_act is not of a dense model"),
        (
            "megatron",
            {"precision": "fp8_rowwise"},
            "megatron: precision=fp8_rowwise cannot be written. Supported: bf16",
        ),
        ("primus", {"tp_overlap": "async", "sequence_parallel": False}, "primus: tp 2 of primus divides the sequence"),
        (
            "megatron",
            {"pp": 4, "dp_shard": 1, "last_stage_less_layers": 2},
            "megatron: first_stage_less_layers 0 and last_stage_less_layers 2 do not leave the other stages equal",
        ),
        (
            "megatron",
            {"pp": 2, "dp_shard": 2, "stages_per_rank": 3, "schedule": "interleaved", "last_stage_less_layers": 4},
            "megatron: first_stage_less_layers 0 and last_stage_less_layers 4 do not divide into 3 stages on a rank",
        ),
        ("own", {"offload_optimizer": True}, "own: offload_optimizer=true cannot be written"),
        ("own", {"model": replace(LLAMA, layers=31)}, "own: no model that workload=parallel trains"),
    ],
)
def test_a_value_that_a_trainer_lacks_is_refused_by_name(trainer: str, values: dict[str, object], message: str) -> None:
    job = example(trainer, **values)
    with pytest.raises(UserInputError) as refusal:
        render(job, job.layout.gpus)
    assert str(refusal.value).startswith(message)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("gpus", "trainer", "message"),
    [
        (16, None, "= 8 ranks, but there are 16"),
        (8, "deepspeed", "trainer=deepspeed: no file can be written for it. Available: megatron, nemo, own, primus"),
    ],
)
def test_a_job_that_does_not_fit_is_refused(gpus: int, trainer: str | None, message: str) -> None:
    with pytest.raises(UserInputError, match=message):
        render(example("megatron"), gpus, trainer)


def test_a_batch_that_does_not_divide_is_refused() -> None:
    with pytest.raises(UserInputError, match="global batch 6 is not a multiple of micro-batch 1 x data parallel 4"):
        render(example("megatron", global_batch=6), 8)


def test_the_number_of_gpus_has_to_be_known() -> None:
    arguments = "pretrain_gpt.py --num-layers 32 --micro-batch-size 1 --tensor-model-parallel-size 2"
    with pytest.raises(UserInputError, match="does not say on how many GPUs"):
        read_layout(arguments)
    assert read_layout(arguments, gpus=8).layout.dp_replicate == 4


def test_a_text_of_no_trainer_is_refused() -> None:
    with pytest.raises(UserInputError, match="no layout found: neither a file of own, torchtitan"):
        read_layout("learning_rate: 0.1\n")
