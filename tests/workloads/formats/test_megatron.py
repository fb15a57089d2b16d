"""Settings of Megatron-LM and of the programs built on it: pipelines, experts, latent attention and memory."""

import pytest

from tests.support.formats import LLAMA, LOGS, example
from tests.support.planner_estimates import cluster
from workloads.api.errors import UserInputError
from workloads.estimator.memory import peak_memory
from workloads.formats import megatron
from workloads.formats.files import read_layout, render
from workloads.formats.megatron import _read_dense_layers
from workloads.formats.printed import read_printed_layout
from workloads.layouts.layout import Layout


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


def test_several_nodes_get_their_rank_from_the_shell() -> None:
    rendered = render(example("megatron", dp_shard=16, global_batch=32), 32)
    assert "--nnodes=4" in rendered.text
    assert "--nproc-per-node=8" in rendered.text
    assert "--node-rank=$NODE_RANK" in rendered.text


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


@pytest.mark.parametrize(
    ("written", "dense"),
    [("([0]*2+[1]*3)", (0, 1)), ("[1,0,1,0,1]", (1, 3)), ("2", (1, 3)), ("([1]*1+[0]*1+[1]*3)", (1,)), ("1", ())],
)
def test_layers_with_experts_of_megatron(written: str, dense: tuple[int, ...]) -> None:
    assert _read_dense_layers({"moe_layer_freq": written}, 5) == dense


def test_a_pattern_of_experts_for_other_layers_is_refused() -> None:
    with pytest.raises(UserInputError, match=r"moe_layer_freq=.*\*3: must be N or a sum .* of 9 layers"):
        _read_dense_layers({"moe_layer_freq": "([0]+[1]*2)*3"}, 9)
