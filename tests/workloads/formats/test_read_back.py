"""Each trainer's file is read back as the job that it was written for."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tests.conftest import examples
from tests.support.formats import JOB_FIELDS, LLAMA, example
from workloads.api.errors import UserInputError
from workloads.formats.files import FORMATS, canonical, read_layout, render
from workloads.layouts.layout import Job, Layout
from workloads.models.model import MODELS, Model

LLAMA_405B = Model(126, 16384, 128, 8, 128, 53248, 128256)
EXPERTS = Model(48, 2048, 32, 4, 128, 0, 151936, experts=128, experts_per_token=8, expert_intermediate_size=768)
GPT = Model(48, 6144, 64, 64, 96, 24576, 51200, "gelu", True, True, True, "learned", 8192)
NEMOTRON = Model(32, 6144, 48, 8, 128, 24576, 256000, activation="squared_relu")
# What each trainer's file expresses: values to draw from, so that most jobs can be written.
SPACES = {
    "own": {
        "model": [LLAMA],
        "sharding": ["none", "fsdp2"],
        "schedule": ["1f1b", "interleaved", "zero_bubble", "zbv", "dualpipev"],
        "cp_method": ["allgather", "ring"],
        "document_tokens": [0, 512],
        "checkpointing": ["none", "selective", "full"],
        "checkpointed_layers": [None, 16, 8],
        "precision": ["bf16", "fp8_tensorwise"],
        "state": ["fp32", "bf16"],
    },
    "torchtitan": {
        "model": [LLAMA, LLAMA_405B, EXPERTS],
        "sharding": ["fsdp2"],
        "schedule": ["1f1b", "interleaved", "zero_bubble", "zbv", "dualpipev"],
        "checkpointing": ["none", "per_op", "full"],
        "precision": ["bf16", "fp32", "fp8_tensorwise", "fp8_rowwise", "fp8_rowwise_gw_hp", "mxfp8"],
        "state": ["fp32", "bf16"],
        "checkpointed_layers": [None, 16, 8],
        "cp_method": ["allgather", "ring"],
        "ep": [1, 2],
    },
    "megatron": {
        "model": [LLAMA, LLAMA_405B, EXPERTS, GPT, NEMOTRON],
        "sharding": ["none", "zero1", "zero2", "megatron_fsdp", "fsdp2"],
        "schedule": ["1f1b", "interleaved"],
        "checkpointing": ["none", "core_attention", "full"],
        "precision": ["bf16", "fp16", "fp32", "fp8_te_delayed", "fp8_te_current", "fp8_te_blockwise", "mxfp8"],
        "state": ["fp32"],
        "checkpointed_layers": [None, 16, 8],
        "cp_method": ["allgather", "ring"],
        "ep": [1, 2],
        "offload_optimizer": [False, True],
        "fused_loss": [False, True],
    },
}
SPACES["primus"] = SPACES["megatron"] | {"schedule": ["1f1b", "interleaved", "zbv", "zero_bubble", "v_half", "v_min"]}
SPACES["nemo"] = SPACES["megatron"] | {"model": [LLAMA, LLAMA_405B, EXPERTS], "precision": ["bf16", "fp16", "mxfp8"]}
DEGREES = {"dp_replicate": [1, 2], "dp_shard": [1, 2, 8], "tp": [1, 2], "cp": [1, 2], "pp": [1, 2, 4]}
DEGREES |= {"first_stage_less_layers": [0, 0, 1], "last_stage_less_layers": [0, 0, 1, 4]}


@st.composite
def jobs(draw: st.DrawFn, trainer: str) -> Job:
    space = {**DEGREES, **SPACES[trainer], "micro_batch": [1, 2], "reshard_after_forward": [True, False]}
    values = {name: draw(st.sampled_from(choices)) for name, choices in space.items()}
    job_values = {name: values.pop(name) for name in JOB_FIELDS if name in values}
    stages = {"1f1b": 1, "zero_bubble": 1 if trainer == "primus" else 2}.get(values["schedule"], 2)
    layout = Layout(**values, stages_per_rank=stages)
    batch = layout.micro_batch * layout.dp * layout.pp * 2
    compiled = draw(st.booleans())
    return Job(
        layout=replace(layout, global_batch=batch),
        sequence_length=8192,
        trainer=trainer,
        compiled=compiled,
        **job_values,
    )


@pytest.mark.parametrize("trainer", FORMATS)
def test_a_file_is_read_back_as_its_job(trainer: str) -> None:
    written = 0

    @settings(examples(15), suppress_health_check=[HealthCheck.filter_too_much])
    @given(jobs(trainer))
    def check(job: Job) -> None:
        nonlocal written
        try:
            rendered = render(job, job.layout.gpus)
        except UserInputError as refusal:
            assert "\n" not in str(refusal)
            assume(False)
        written += 1
        reading = read_layout(rendered.text)
        assert reading.job == canonical(job, trainer)
        assert not reading.notes

    check()
    assert written >= 3


LESS = {"pp": 4, "dp_shard": 2, "tp": 1}
UNEQUAL: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    ("megatron", {"last_stage_less_layers": 4}, ("--decoder-last-pipeline-num-layers=5",)),
    (
        "megatron",
        {"first_stage_less_layers": 1, "last_stage_less_layers": 3},
        ("--decoder-first-pipeline-num-layers=8", "--decoder-last-pipeline-num-layers=6"),
    ),
    (
        "nemo",
        {"last_stage_less_layers": 4},
        ("model.num_layers_in_last_pipeline_stage=5",),
    ),
    ("primus", {"last_stage_less_layers": 4}, ("decoder_last_pipeline_num_layers: 5",)),
    (
        "torchtitan",
        {"last_stage_less_layers": 4},
        (
            "pipeline_parallel_layers_per_stage = 9",
            "pipeline_parallel_first_stage_less_layers = 0",
            "pipeline_parallel_last_stage_less_layers = 4",
        ),
    ),
    (
        "torchtitan",
        {},
        ("pipeline_parallel_layers_per_stage = 8", "pipeline_parallel_last_stage_less_layers = 0"),
    ),
    ("own", {"last_stage_less_layers": 4}, ("space.last_stage_less_layers=4",)),
]


@pytest.mark.parametrize(("trainer", "less", "lines"), UNEQUAL)
def test_stages_of_unequal_sizes_are_written_and_read_back(
    trainer: str, less: dict[str, int], lines: tuple[str, ...]
) -> None:
    job = example(trainer, **LESS, **less)
    text = render(job, 8).text
    assert all(line in text for line in lines) and "account" not in text
    layout = read_layout(text).layout
    assert {name: getattr(layout, name) for name in less} == less and layout.stages == 4


@pytest.mark.parametrize("trainer", ["megatron", "nemo", "primus"])
@pytest.mark.parametrize("values", [{"qk_norm": "head", "rope_theta": 1e6, "norm_eps": 1e-6}, {"rope_factor": 32.0}])
def test_vectors_and_rotary_embeddings_of_a_model_are_read_back(trainer: str, values: dict[str, Any]) -> None:
    rendered = render(example(trainer, replace(LLAMA, **values)), 8)
    read = read_layout(rendered.text).job.model
    if trainer == "nemo" and "rope_factor" in values:
        assert read.rope_factor is None and "does not scale rotary frequencies" in rendered.notes[-1]
    else:
        assert {name: getattr(read, name) for name in values} == values


@pytest.mark.parametrize(
    ("trainer", "file", "written"),
    [
        ("megatron", "megatron", ("--moe-token-dispatcher-type=flex", "--moe-enable-deepep")),
        ("torchtitan", "torchtitan", ('expert_parallel_comm_backend = "deepep"',)),
    ],
)
def test_a_file_names_how_tokens_reach_experts(trainer: str, file: str, written: tuple[str, ...]) -> None:
    layout = Layout(dp_shard=8, ep=8, sharding="fsdp2" if trainer == "torchtitan" else "zero1", global_batch=8)
    job = Job(MODELS["qwen3_30b_a3b"], layout, 4096, trainer=trainer, dispatcher="deepep")
    text = render(job, 8, file).text
    assert all(words in text for words in written), text
    assert read_layout(text, 8, job.model).others["dispatcher"] == "deepep"
    if trainer == "torchtitan":
        with pytest.raises(UserInputError, match="torchtitan: expert_overlap=true cannot be written"):
            render(replace(job, expert_overlap=True), 8, file)
