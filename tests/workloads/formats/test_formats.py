"""Each trainer's file is read back as the job that it was written for, and what a trainer lacks is refused by name."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tests.conftest import REPOSITORY, examples
from tests.support.planner_estimates import cluster
from workloads.api.contract import Machine, Rank
from workloads.api.errors import UserInputError
from workloads.api.registry import load
from workloads.command.invocation import build_invocation
from workloads.command.layouts import estimate_layout, read_job
from workloads.estimator.memory import peak_memory
from workloads.formats import megatron, torchtitan
from workloads.formats.files import FORMATS, canonical, read_layout, render
from workloads.formats.megatron import _read_dense_layers
from workloads.formats.own import own_support
from workloads.formats.printed import read_printed_layout
from workloads.layouts.layout import ExpertLoads, Job, Layout
from workloads.layouts.trainers import TRAINERS
from workloads.models.model import MODELS, TRAINED_MODELS, Model

LOGS = Path(__file__).parents[2] / "samples" / "logs"
LLAMA = Model(32, 4096, 32, 8, 128, 14336, 128256)
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
JOB_FIELDS = ("model", "precision", "state", "document_tokens", "fused_loss")


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


@pytest.mark.parametrize(
    ("options", "less"),
    [
        ("--decoder-last-pipeline-num-layers 5", (0, 4)),  # 9, 9, 9, 5
        ("--decoder-first-pipeline-num-layers 11", (-4, 0)),  # 11, 7, 7, 7
        ("--decoder-first-pipeline-num-layers 9 --decoder-last-pipeline-num-layers 7", (-1, 1)),  # 9, 8, 8, 7
        ("--decoder-last-pipeline-num-layers 14 --num-virtual-stages-per-pipeline-rank 2", (0, -8)),  # 6, 6, 6, 14
        ("--account-for-loss-in-pipeline-split", (0, 1)),
    ],
)
def test_numbers_of_layers_on_the_ends_are_read(options: str, less: tuple[int, int]) -> None:
    text = f"python pretrain_gpt.py --num-layers 32 --pipeline-model-parallel-size 4 --micro-batch-size 1 {options}"
    reading = read_layout(text, 8)
    assert reading.layout.less_layers == less and not reading.left
    assert {field for field, _ in reading.taken.values()} & {"first_stage_less_layers", "last_stage_less_layers"}


@pytest.mark.parametrize("trainer", ["megatron", "nemo", "primus"])
@pytest.mark.parametrize("values", [{"qk_norm": "head", "rope_theta": 1e6, "norm_eps": 1e-6}, {"rope_factor": 32.0}])
def test_vectors_and_rotary_embeddings_of_a_model_are_read_back(trainer: str, values: dict[str, Any]) -> None:
    rendered = render(example(trainer, replace(LLAMA, **values)), 8)
    read = read_layout(rendered.text).job.model
    if trainer == "nemo" and "rope_factor" in values:
        assert read.rope_factor is None and "does not scale rotary frequencies" in rendered.notes[-1]
    else:
        assert {name: getattr(read, name) for name in values} == values


def example(trainer: str, model: Model = LLAMA, **values: object) -> Job:
    """Return a job of 8 GPUs that every trainer's file expresses, with some values changed."""
    of_job = {name: values.pop(name) for name in (*JOB_FIELDS, "compiled") if name in values}
    sharding = "fsdp2" if trainer in ("own", "torchtitan") else "zero1"
    layout = {"dp_shard": 4, "tp": 2, "sharding": sharding, "global_batch": 16, **values}
    state = "bf16" if trainer == "own" else "fp32"
    return Job(model, Layout(**layout), 8192, trainer, **({"state": state} | of_job))  # type: ignore[arg-type]


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
        ("own", {"model": replace(LLAMA, layers=31)}, "own: model is none of this project's catalogue"),
    ],
)
def test_a_value_that_a_trainer_lacks_is_refused_by_name(trainer: str, values: dict[str, object], message: str) -> None:
    job = example(trainer, **values)
    with pytest.raises(UserInputError) as refusal:
        render(job, job.layout.gpus)
    assert str(refusal.value).startswith(message)
    assert "\n" not in str(refusal.value)


def test_a_model_without_a_flavor_names_the_nearest_one() -> None:
    with pytest.raises(UserInputError, match=r"Nearest: llama3 8B, which differs in layers \(32, not 31\)"):
        render(example("torchtitan", replace(LLAMA, layers=31)), 8)


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


def test_a_pipeline_of_torchtitan_is_filled_by_one_local_batch() -> None:
    job = example("torchtitan", pp=2, dp_shard=2, micro_batch=2, global_batch=32)
    text = render(job, 8).text
    assert "local_batch_size = 16" in text
    assert "pipeline_parallel_microbatch_size = 2" in text


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        ({"tp": 2}, ""),  # programs pad a vocabulary
        ({"pp": 4, "stages_per_rank": 2, "schedule": "interleaved", "micro_batch": 2, "dp_shard": 2}, "multiple of 4"),
    ],
)
def test_a_program_of_an_unknown_trainer_follows_the_rules_of_other_trainers(
    layout: dict[str, object], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for models in (MODELS, TRAINED_MODELS):
        monkeypatch.setitem(models, "odd", replace(MODELS["llama3_8b"], vocabulary=50_257))
    sizes: dict[str, Any] = {"global_batch": "24", "sequence_length": "1024", "dtype": "bf16"}
    settings = load("command").Settings(run="x", model="odd", layout=layout, **sizes)  # type: ignore[attr-defined]
    estimate = estimate_layout(settings, {}, Machine("gpu", "sm90", 8, 8, 80.0, cluster=cluster(8)))
    assert (reason in estimate.unsupported_reason) if reason else not estimate.unsupported_reason


@pytest.mark.parametrize("pp", [1, 2])
def test_the_preset_of_torchtitan_writes_the_layout_that_is_estimated(pp: int) -> None:
    preset = yaml.safe_load((REPOSITORY / "conf/workload/torchtitan.yaml").read_text())
    command: Any = load("command")
    given_settings = command.Settings(**preset["command"])
    values = preset["space"] | {"tp": 2, "pp": pp, "micro_batch": 2, "global_batch": 32, "checkpointing": "full"}
    text = build_invocation(given_settings, values, Rank(world_size=8, ranks_per_node=8), "o").files["config.toml"]
    estimated = read_job(given_settings, values, Machine("gpu", "sm90", 8, 8, 80.0, cluster=cluster(8)))
    assert f"local_batch_size = {2 if pp == 1 else 16}" in text
    assert read_layout(text, gpus=8).layout == canonical(estimated, "torchtitan").layout


def test_several_nodes_get_their_rank_from_the_shell() -> None:
    rendered = render(example("megatron", dp_shard=16, global_batch=32), 32)
    assert "--nnodes=4" in rendered.text
    assert "--nproc-per-node=8" in rendered.text
    assert "--node-rank=$NODE_RANK" in rendered.text


def test_the_number_of_gpus_has_to_be_known() -> None:
    arguments = "pretrain_gpt.py --num-layers 32 --micro-batch-size 1 --tensor-model-parallel-size 2"
    with pytest.raises(UserInputError, match="does not say on how many GPUs"):
        read_layout(arguments)
    assert read_layout(arguments, gpus=8).layout.dp_replicate == 4


def test_a_text_of_no_trainer_is_refused() -> None:
    with pytest.raises(UserInputError, match="no layout found: neither a file of own, torchtitan"):
        read_layout("learning_rate: 0.1\n")


@pytest.mark.parametrize("log", ["titan.log", "titan_rank_prefix.log", "titan_srun_prefix.log", "titan_fp8.log"])
def test_torchtitan_s_log_has_its_layout(log: str) -> None:
    reading = read_layout((LOGS / log).read_text())
    layout = reading.layout
    assert (layout.dp_shard, layout.tp, layout.micro_batch, layout.sharding) == (4, 2, 1, "fsdp2")
    assert (layout.checkpointing, reading.sequence_length, reading.model) == ("full", 4096, LLAMA)
    assert layout.global_batch in (4, 8)
    assert reading.precision == ("fp8_tensorwise" if log == "titan_fp8.log" else "bf16")


def test_megatron_s_log_has_its_layout_without_the_model() -> None:
    reading = read_layout((LOGS / "megatron.log").read_text())
    expected = Layout(
        dp_replicate=8, tp=2, pp=2, global_batch=64, sharding="none", sequence_parallel=False, cp_method="allgather"
    )
    assert (reading.layout, reading.sequence_length, reading.precision) == (expected, 4096, "bf16")
    assert "use_distributed_optimizer, recompute_granularity" in reading.notes[0]  # the sample has few arguments
    with pytest.raises(UserInputError, match="does not name all sizes of the model"):
        _ = reading.job


def test_a_log_s_printed_layout_has_no_defaults_of_the_program() -> None:
    assert read_printed_layout((LOGS / "megatron.log").read_text(), 32) == {}
    arguments = (
        "using world size: 8\n  use_distributed_optimizer ........ True\n  recompute_granularity .......... full\n"
        "  recompute_method ............... block\n  recompute_num_layers ............ 4\n"
        "  virtual_pipeline_model_parallel_size ....... None\n"
    )
    expected = {"sharding": "zero1", "checkpointing": "full", "checkpointed_layers": 4}
    assert read_printed_layout(arguments, 8) == expected


def test_an_experiment_of_primus_leaves_sizes_to_its_model() -> None:
    text = """
modules:
  pre_trainer:
    framework: megatron
    config: pre_trainer.yaml
    model: llama3_8B.yaml
    overrides:
      micro_batch_size: 2
      global_batch_size: 128
      seq_length: ${PRIMUS_SEQ_LENGTH:8192}
      recompute_granularity: full
      recompute_method: block
      recompute_num_layers: 8
"""
    job = read_layout(text, gpus=8).job
    layout = job.layout
    assert (job.model, job.sequence_length, layout.dp_shard, layout.sharding) == (LLAMA, 8192, 8, "zero1")
    assert (layout.checkpointing, layout.checkpointed_layers) == ("full", 8)


LATENT = """
modules:
  pre_trainer:
    framework: megatron
    model: deepseek_v3.yaml
    overrides: {micro_batch_size: 1, global_batch_size: 8, seq_length: 4096, multi_latent_attention: VALUE}
"""


@pytest.mark.parametrize(("value", "rank"), [("true", 512), ("true, kv_lora_rank: 64", 64), ("false", 0)])
def test_an_experiment_leaves_the_rank_of_latent_attention_to_its_model(value: str, rank: int) -> None:
    assert read_layout(LATENT.replace("VALUE", value), gpus=8).sizes["kv_rank"] == rank


def test_a_script_without_a_rank_of_latent_attention_has_megatron_s_default() -> None:
    script = "torchrun pretrain_gpt.py --num-layers 27 --multi-latent-attention --micro-batch-size 1 --seq-length 4096"
    assert read_layout(script, gpus=1).sizes["kv_rank"] == megatron.DEFAULT_KV_RANK


def test_an_experiment_with_adapters_is_refused() -> None:
    text = LATENT.replace("VALUE}", "true, lora: {enabled: IS_ON, dim: 16}}")
    for adapters in (text.replace("IS_ON", "true"), text.replace("{enabled: IS_ON, dim: 16}", "true")):
        with pytest.raises(UserInputError, match="peft=lora: training of adapters is not planned"):
            read_layout(adapters, gpus=8)
    assert read_layout(text.replace("IS_ON", "false"), gpus=8).trainer == "primus"


@pytest.mark.parametrize(
    ("layout", "stages"),
    [('"Et*4|(t*4|)*14tmL"', 8), ('"Et*31|t*30mL"', 1), ("[[embedding, decoder], [decoder, loss]]", 1)],
)
def test_a_layout_of_a_pipeline_gives_the_stages_of_a_rank(layout: str, stages: int) -> None:
    settings = f"true, pipeline_model_parallel_size: 2, pipeline_model_parallel_layout: {layout}"
    assert read_layout(LATENT.replace("VALUE", settings), gpus=8).layout.stages_per_rank == stages


@pytest.mark.parametrize(("layout", "stages"), [("Et*61mL", 1), ("Et*16|t*30|t*15mL", 3)])
def test_a_layout_of_a_pipeline_that_its_ranks_cannot_share_is_refused(layout: str, stages: int) -> None:
    settings = f"true, pipeline_model_parallel_size: 2, pipeline_model_parallel_layout: '{layout}'"
    with pytest.raises(UserInputError, match=f"layout: {stages} stages are not a multiple of pp 2"):
        read_layout(LATENT.replace("VALUE", settings), gpus=8)


def test_gemms_that_per_op_checkpointing_recomputes_are_refused() -> None:
    text = render(example("torchtitan", checkpointing="per_op"), 8).text
    forced = text.replace("[activation_checkpoint]", f"[activation_checkpoint]\n{torchtitan.FORCED} = NAMES")
    assert read_layout(forced.replace("NAMES", '["moe.router.gate"]')).layout.checkpointing == "per_op"
    with pytest.raises(UserInputError, match=r"=attention.wq: no layout has these. Known: moe.router.gate"):
        read_layout(forced.replace("NAMES", '["attention.wq", "moe.router.gate"]'))


@pytest.mark.parametrize("option", ["--grad-reduce-in-bf16", "--main-grads-dtype bf16"])
def test_gradients_in_bf16_take_half_of_the_memory_of_megatron_s(option: str) -> None:
    script = render(example("megatron"), 8).text.rstrip()
    gib = [peak_memory(read_layout(text).job, cluster()).gradients for text in (f"{script} {option}", script)]
    assert gib[0] == gib[1] / 2 > 0


def test_moments_take_the_memory_of_their_data_types_in_an_optimizer_that_has_them() -> None:
    script = render(example("megatron"), 8).text.rstrip()
    kinds = "--exp-avg-dtype bf16 --exp-avg-sq-dtype"
    aware = f"{script} --use-precision-aware-optimizer {kinds}"
    texts = (script, f"{script} {kinds} bf16", f"{aware} fp32", f"{aware} bf16", f"{aware} fp8")
    gib = [peak_memory(read_layout(text).job, cluster()).optimizer_states for text in texts]
    weights_gib = peak_memory(read_layout(script).job, cluster()).parameters
    shared = [size - gib[-1] for size in gib]
    assert gib[0] == gib[1] and weights_gib > 0
    assert shared[:4] == pytest.approx([shared[0], shared[0], shared[0] * 3 / 5, shared[0] / 5])


def test_transformer_engine_s_cross_entropy_needs_10_bytes_per_logit_less_than_megatron_s() -> None:
    script = render(example("megatron"), 8).text.rstrip() + " --cross-entropy-loss-fusion --cross-entropy-fusion-impl"
    fused, native = (read_layout(f"{script} {name}").job for name in ("te", "native"))
    assert (fused.fused_loss, native.fused_loss) == (True, False)
    logits = native.sequence_length * native.model.vocabulary / native.layout.tp
    saved_gib = peak_memory(native, cluster()).working - peak_memory(fused, cluster()).working
    assert saved_gib == pytest.approx(10 * logits / 2**30)


def test_what_a_job_has_no_field_for_is_noted() -> None:
    text = render(example("torchtitan"), 8).text.replace("steps = 20", "steps = 20\nenable_cpu_offload = true")
    assert [note.split(":")[0] for note in read_layout(text).notes] == ["training.enable_cpu_offload"]


@pytest.mark.parametrize(
    ("line", "changed", "message"),
    [
        ('mode = "none"', 'mode = "memory_budget"', "activation_checkpoint.mode=memory_budget: no layout has it"),
        ('rotate_method = "allgather"', 'rotate_method = "round"', "context_parallel_rotate_method=round: not known"),
    ],
)
def test_an_unknown_value_of_torchtitan_is_refused(line: str, changed: str, message: str) -> None:
    text = render(example("torchtitan"), 8).text
    assert line in text
    with pytest.raises(UserInputError, match=message):
        read_layout(text.replace(line, changed))


def test_own_sweeps_have_what_the_planner_says_of_this_project_s_trainer() -> None:
    values = own_support().values
    runs = {name: some for name, some in TRAINERS["own"].runs.items() if name not in ("dispatcher", "expert_overlap")}
    assert {name: set(values[name]) for name in runs} == {name: set(some) for name, some in runs.items()}


@pytest.mark.parametrize("loads", ["equal", "natural"])
def test_own_sweeps_route_tokens_as_planned(loads: ExpertLoads) -> None:
    text = render(replace(example("own", MODELS["qwen3_30b_a3b"]), expert_loads=loads), 8).text
    assert ("space.imbalance=1 " in text) == (loads == "equal")


def test_what_follows_from_a_job_is_written_of_settings_of_the_table() -> None:
    for module in (megatron, torchtitan):
        of_fields, written = ({name.key for name in module.NAMES if getattr(name, way)} for way in ("field", "write"))
        assert module.WRITTEN.keys() <= written
        assert {name.key for name in module.NAMES if name.write is None} <= of_fields


@pytest.mark.parametrize(
    ("written", "dense"),
    [("([0]*2+[1]*3)", (0, 1)), ("[1,0,1,0,1]", (1, 3)), ("2", (1, 3)), ("([1]*1+[0]*1+[1]*3)", (1,)), ("1", ())],
)
def test_layers_with_experts_of_megatron(written: str, dense: tuple[int, ...]) -> None:
    assert _read_dense_layers({"moe_layer_freq": written}, 5) == dense


def test_a_pattern_of_experts_for_other_layers_is_refused() -> None:
    with pytest.raises(UserInputError, match=r"moe_layer_freq=.*\*3: must be N or a sum .* of 9 layers"):
        _read_dense_layers({"moe_layer_freq": "([0]+[1]*2)*3"}, 9)


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
