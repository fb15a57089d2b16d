"""A plan takes everything that a trainer's file says, prints it by both names, and names what it did not take."""

from dataclasses import replace
from pathlib import Path

import pytest

from sweeper.commands.plan.main import COMMAND
from sweeper.commands.plan.request import Problem, build_problem, read_request
from sweeper.commands.plan.text import file_lines
from workloads.api.errors import UserInputError
from workloads.layouts.rules import find_violation

SCRIPT = """
NODES=2
SIZES=(--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096)
PARALLEL=" --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel "
TRAIN=(
    --micro-batch-size 1
    --global-batch-size $((NODES * 16))  # (sequences)
    --bf16 --fp8-format hybrid --fp8-recipe tensorwise
    --grad-reduce-in-bf16 --tp-comm-overlap
)
torchrun --nnodes $NODES --nproc_per_node 8 pretrain_gpt.py "${SIZES[@]}" $PARALLEL ${TRAIN[@]} $EXTRA_ARGS
"""
CLOSED = SCRIPT.replace(" $EXTRA_ARGS", "")  # all arguments are in the file
CLOSED_SWIGLU = CLOSED.replace(
    "(--num", "(--swiglu --untie-embeddings-and-output-weights --group-query-attention --num-query-groups 8 --num"
)
YAML = """
ENV_VARS: {SOME_VARIABLE: 1}
MODEL_ARGS:
  --micro-batch-size: 2
  --global-batch-size: 64
  --seq-length: 2048
  --tensor-model-parallel-size: 4
  --disable-bias-linear: true
  --use-distributed-optimizer: true
  --fp4-format: e2m1
  --save: ${FOLDER}
"""
OLD_TITAN = """
[model]
name = "llama3"
flavor = "8B"
[training]
batch_size = 4
seq_len = 2048
data_parallel_degree = -1
tensor_parallel_degree = 2
fsdp_reshard = true
[experimental]
pipeline_parallel_degree = 2
[activation_checkpoint]
mode = "full"
"""
RECIPE = """
NAME=llama3_8b
run="uv run scripts/training/run_recipe.py --recipe ${NAME}_pretrain_config -tp 2 --micro_batch_size=2 -sl 2048"
srun bash -c "$run --lr 1e-4 train.global_batch_size=64 model.pipeline_model_parallel_size=2 $EXTRA"
"""
TITAN_LOG = """
[titan] 2026-01-01 00:00:00,000 - root - INFO - Running with configs: {
  "model": {"name": "llama3", "flavor": "8B"},
  "training": {"seq_len": 2048}
}
"""
PRIMUS = """
modules:
  pre_trainer:
    framework: FRAMEWORK
    model: ${MODEL:llama3.1_8B-fp8}.yaml
    overrides: OVERRIDES
"""
TITAN_INSIDE = "{training: {local_batch_size: 2, seq_len: '${LENGTH:1024}'}, parallelism: {tensor_parallel_degree: 2}}"
BRIDGE_INSIDE = "{micro_batch_size: 2, seq_length: 1024, tensor_model_parallel_size: 2, precision_config: fp16_mixed}"
MEGATRON_INSIDE = "{seq_length: 1024, tensor_model_parallel_size: 2, micro_batch_size: 2, moe_enable_deepep: true}"

LATENT_INSIDE = MEGATRON_INSIDE.replace("}", ", multi_latent_attention: true, kv_lora_rank: 512}")
LATENT_LOG = """
  num_layers ...................................... 32
  tensor_model_parallel_size ...................... 2
  multi_latent_attention .......................... True
  kv_lora_rank .................................... 512
"""


def write(folder: Path, text: str) -> str:
    (folder / "file").write_text(text)
    return f"layout={folder / 'file'}"


def build(folder: Path, text: str, *words: str, model: str = "llama3_8b", hardware: str = "b200") -> Problem:
    words = (f"model={model}", f"hardware={hardware}", "gpus=16", write(folder, text), *words)
    return build_problem(read_request(words))


def primus(framework: str, overrides: str) -> str:
    return PRIMUS.replace("FRAMEWORK", framework).replace("OVERRIDES", overrides)


@pytest.mark.parametrize(
    ("text", "of_job", "of_layout"),
    [
        (
            SCRIPT,
            {"trainer": "megatron", "sequence_length": 4096, "precision": "fp8_te_current", "gradient_bytes": 2},
            {"tp": 2, "pp": 2, "micro_batch": 1, "tp_overlap": "async", "dp_replicate": 4},
        ),
        (
            YAML,
            {"trainer": "megatron", "sequence_length": 2048, "precision": "nvfp4"},
            {"tp": 4, "micro_batch": 2, "sharding": "zero1", "dp_shard": 4},
        ),
        (
            RECIPE,
            {"trainer": "nemo", "sequence_length": 2048, "precision": "bf16"},
            {"tp": 2, "pp": 2, "micro_batch": 2, "sharding": "zero1", "dp_shard": 4},
        ),
        (
            OLD_TITAN,
            {"trainer": "torchtitan", "sequence_length": 2048, "precision": "bf16", "compiled": False},
            {"tp": 2, "pp": 2, "micro_batch": 2, "dp_shard": 4, "checkpointing": "full"},
        ),
        (
            primus("torchtitan", TITAN_INSIDE),
            {"trainer": "torchtitan", "sequence_length": 1024, "precision": "fp8_tensorwise", "compiled": True},
            {"tp": 2, "micro_batch": 2, "checkpointing": "none", "dp_shard": 8},
        ),
        (
            primus("megatron_bridge", BRIDGE_INSIDE),
            {"trainer": "nemo", "sequence_length": 1024, "precision": "fp16"},
            {"tp": 2, "micro_batch": 2, "sharding": "zero1"},
        ),
        (
            primus("megatron", MEGATRON_INSIDE),
            {"trainer": "primus", "sequence_length": 1024, "precision": "bf16", "dispatcher": "deepep"},
            {"tp": 2, "micro_batch": 2, "sharding": "zero1"},
        ),
    ],
)
def test_a_plan_takes_all_that_a_file_says(
    tmp_path: Path, text: str, of_job: dict[str, object], of_layout: dict[str, object]
) -> None:
    problem = build(tmp_path, text)
    assert {name: getattr(problem.job, name) for name in of_job} == of_job
    assert {name: problem.given[name] for name in of_layout} == of_layout


def read_lines(problem: Problem) -> dict[str, str]:
    assert problem.reading is not None
    return {line[:10].strip(): line[10:] for line in file_lines(problem, problem.reading)}


def test_what_was_taken_has_both_names_and_the_rest_is_listed(tmp_path: Path) -> None:
    lines = read_lines(build(tmp_path, OLD_TITAN))
    assert "micro_batch=2 (training.batch_size=4)" in lines["taken"]
    assert "tp=2 (training.tensor_parallel_degree)" in lines["taken"]
    assert "precision=bf16" in lines["default"] and "tp=" not in lines["default"]
    assert lines["not taken"] == "training.fsdp_reshard"
    lines = read_lines(build(tmp_path, SCRIPT))
    assert "of the model: num_layers, hidden_size, num_attention_heads" in lines["taken"]
    assert lines["not taken"] == "$EXTRA_ARGS"


def test_a_recipe_names_its_model_and_says_what_it_leaves_open(tmp_path: Path) -> None:
    lines = read_lines(build(tmp_path, RECIPE))
    assert "of the model: recipe" in lines["taken"] and lines["not taken"].startswith("$EXTRA, lr")
    reading = build(tmp_path, RECIPE.replace("llama3_8b", "gemma9_1b")).reading
    assert reading is not None and "the recipe of Megatron-Bridge sets what" in reading.notes[0]
    assert reading.notes[1].startswith("recipe=gemma9_1b_pretrain_config: its sizes are not known")


def test_a_word_of_the_command_goes_before_the_file(tmp_path: Path) -> None:
    problem = build(tmp_path, OLD_TITAN, "sequence_length=8192", "precision=fp8_rowwise", "tp=1")
    assert (problem.job.sequence_length, problem.job.precision, problem.given["tp"]) == (8192, "fp8_rowwise", 1)
    assert "training.seq_len (sequence_length=8192 is given)" in read_lines(problem)["not taken"]


@pytest.mark.parametrize(
    ("text", "words", "expected"),
    [
        (YAML, ["tp=8"], {"dp_replicate": 1, "dp_shard": 2, "sharding": "zero1"}),
        (YAML.replace("size: 4", "size: 16"), ["tp=2"], {"dp_replicate": 1, "dp_shard": 8, "sharding": "zero1"}),
        (YAML.replace("size: 4", "size: 32"), ["tp=2", "pp=2"], {"dp_shard": 4, "pp": 2, "sharding": "zero1"}),
        (CLOSED_SWIGLU, ["tp=4"], {"dp_replicate": 2, "dp_shard": 1}),
        (OLD_TITAN, ["pp=1"], {"dp_replicate": 1, "dp_shard": 8}),
    ],
)
def test_data_parallelism_follows_from_degrees_of_the_command(
    tmp_path: Path, text: str, words: list[str], expected: dict[str, object]
) -> None:
    given = build(tmp_path, text, *words).given
    assert {name: given[name] for name in expected} == expected


def test_a_degree_that_the_file_sets_does_not_follow(tmp_path: Path) -> None:
    with pytest.raises(UserInputError, match=r"file: dp_shard=4 x tp=4 x pp=2 = 32, but gpus=16\. Set gpus=32 or dp_s"):
        build(tmp_path, OLD_TITAN.replace("degree = -1", "degree = 4"), "tp=4")


@pytest.mark.parametrize(("gpus", "remedy"), [(8, " or dp_shard=2"), (32, " or dp_shard=8"), (18, "")])
def test_degrees_that_contradict_the_number_of_gpus_are_named(tmp_path: Path, gpus: int, remedy: str) -> None:
    fixed = write(tmp_path, OLD_TITAN.replace("degree = -1", "degree = 4"))
    with pytest.raises(UserInputError) as refusal:
        build_problem(read_request(["model=llama3_8b", "hardware=h100", fixed, f"gpus={gpus}"]))
    assert str(refusal.value) == f"{fixed}: dp_shard=4 x tp=2 x pp=2 = 16, but gpus={gpus}. Set gpus=16{remedy}"
    assert build_problem(read_request(["hardware=h100", fixed])).cluster.gpus == 16


OWN = "python -m sweeper workload=parallel space.dp_shard=8 space.tp=2 space.model=llama3_1b gpus=16"


@pytest.mark.parametrize(
    ("words", "gpus"), [([], 16), (["gpus=8", "dp_shard=4"], 8), (["max_cost=1e9"], 16), (["days=1e5"], 16)]
)
def test_a_file_gives_the_model_and_the_number_of_gpus(tmp_path: Path, words: list[str], gpus: int) -> None:
    request = read_request(["hardware=h100", write(tmp_path, OWN), *words])
    assert (request.model, request.gpus) == ("llama3_1b", gpus)
    lines = read_lines(build_problem(request))
    is_given = "gpus=8" in words
    assert ("gpus=16 (gpus)" in lines["taken"]) != is_given
    assert ("gpus (gpus=8 is given)" in lines.get("not taken", "")) == is_given


@pytest.mark.parametrize(
    ("text", "model", "gpus"),
    [
        (OWN.replace(" space.model=llama3_1b gpus=16", ""), "llama3_8b", 16),
        (OLD_TITAN.replace("degree = -1", "degree = 4"), "llama3_8b", 16),
        (CLOSED_SWIGLU.replace("(--", "(--ffn-hidden-size 14336 --vocab-size 128256 --"), "llama3_8b", 16),
    ],
)
def test_sizes_of_a_file_name_its_model(tmp_path: Path, text: str, model: str, gpus: int) -> None:
    request = read_request(["hardware=h100", write(tmp_path, text)])
    assert (request.model, request.gpus) == (model, gpus)


UNKNOWN_FLAVOR = '[model]\nflavor = "71B"\n[training]\n[parallelism]\ndata_parallel_shard_degree = 8\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (OWN.replace("dp_shard=8", "dp_shard=4"), r"dp_shard=4 x tp=2 = 8, but gpus=16\. Set gpus=8 or dp_shard=8"),
        (OWN.replace("gpus=16", "gpus=8,16"), "file: gpus=8,16: a layout needs one value"),
        (OWN.replace("gpus=16", "space.layers=4"), "model=llama3_1b: .* of another model: layers 4, not 16"),
        (OLD_TITAN, r"does not say on how many GPUs it runs: pass their number \(gpus=\)"),
        (UNKNOWN_FLAVOR, "model: required, because .*/file names none that is known .71B.$"),
        ("[training\nseq_len = 8192\n", r"no layout found: as TOML: Expected '\]' .* \(at line 1, column 10\)$"),
        (SCRIPT, "model: required, because .*/file names none that is known .layers=32 hidden_size=4096 heads=32.$"),
    ],
)
def test_a_file_that_does_not_say_enough_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserInputError, match=message):
        build_problem(read_request(["hardware=h100", write(tmp_path, text)]))


def test_the_block_of_a_command_is_planned(tmp_path: Path) -> None:
    manual = build_problem(read_request(["hardware=h100", write(tmp_path, f"{OWN} space.block=manual")]))
    assert manual.job.manual_backward and "manual_backward=true (block=manual)" in read_lines(manual)["taken"]


def test_what_was_taken_is_printed_where_nothing_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = OLD_TITAN.replace("batch_size = 4", "batch_size = 512")
    with pytest.raises(UserInputError, match="no layout fits"):
        COMMAND.run(["model=llama3_8b", "hardware=h100", "gpus=16", write(tmp_path, text)])
    assert "taken     micro_batch=256 (training.batch_size=512)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "model", "message"),
    [
        (OLD_TITAN, "llama3_70b", r"is of another model: layers 32, not 80.* Did you mean model=llama3_8b\?"),
        (SCRIPT, "llama3_70b", "is of another model: layers 32, not 80, hidden_size 4096, not 8192"),
        (RECIPE, "llama3_70b", r"is of another model: layers 32, not 80.* Did you mean model=llama3_8b\?"),
        (primus("torchtitan", TITAN_INSIDE), "llama2_13b", r"layers 32, not 40.* Did you mean model=llama3_8b\?"),
        (TITAN_LOG, "llama2_13b", r"layers 32, not 40.* Did you mean model=llama3_8b\?"),
        (primus("megatron", MEGATRON_INSIDE), "qwen3_8b", r"layers 32, not 36.* Did you mean model=llama3_8b\?"),
        (SCRIPT.replace("(--num", "(--multi-latent-attention --num"), "llama3_8b", "model: kv_rank 32, not 0"),
        (SCRIPT.replace("(--num", "(--mtp-num-layers 1 --num"), "llama3_8b", "model: prediction_layers 1, not 0"),
        (SCRIPT.replace("(--num", "(--hybrid-override-pattern M-M*/*E --num"), "llama3_8b", "linear_layers 2, not 0"),
        (SCRIPT.replace("(--num", "(--linear-attention-freq 4 --num"), "llama3_8b", "model: linear_layers 24, not 0"),
        (RECIPE.replace("train.g", "model.multi_latent_attention=true train.g"), "llama3_8b", "kv_rank 32, not 0"),
        (primus("megatron", LATENT_INSIDE), "llama3_8b", "model: kv_rank 512, not 0"),
        (LATENT_LOG, "llama3_8b", "model: kv_rank 512, not 0"),
        (
            LATENT_LOG.replace("kv_lora_rank .", "swiglu .......").replace(" 512", " False"),
            "deepseek_v3",
            "gelu, not sw",
        ),
        (CLOSED, "llama3_8b", "activation gelu, not swiglu, tied true, not false, kv_heads 32, not 8"),
        (CLOSED, "mixtral_8x7b", "activation gelu.* experts 0, not 8"),
        (SCRIPT.replace("(--num", "(--vocab-size 32000 --num"), "llama3_8b", "model: vocabulary 32000, not 128256"),
        (SCRIPT.replace("(--num", "(--position-embedding-type none --num"), "llama3_8b", "positions none, not rope"),
        (primus("megatron", "{seq_length: 1, padded_vocab_size: 50304}"), "llama3_8b", "vocabulary 50304, not 128256"),
    ],
)
def test_a_model_that_contradicts_the_file_is_refused(tmp_path: Path, text: str, model: str, message: str) -> None:
    with pytest.raises(UserInputError, match=message):
        build(tmp_path, text, model=model)


def test_a_file_may_pad_the_vocabulary_and_leave_the_activation_to_other_files(tmp_path: Path) -> None:
    padded = CLOSED_SWIGLU.replace("(--num", "(--vocab-size 128000 --num")
    assert build(tmp_path, padded).given["tp"] == 2
    assert build(tmp_path, primus("megatron", MEGATRON_INSIDE), model="llama3_8b").given["tp"] == 2
    assert build(tmp_path, RECIPE.replace("llama3_8b", "gpt3_175b"), model="gpt3_175b").given["tp"] == 2
    wide = primus("megatron", "{seq_length: 1, vocab_size: 128256, padded_vocab_size: 131072, micro_batch_size: 3}")
    assert build(tmp_path, wide, model="llama3_8b").given["micro_batch"] == 3
    tied = primus("megatron", MEGATRON_INSIDE).replace("llama3.1_8B-fp8", "llama3.2_1B")
    assert build(tmp_path, tied, model="llama3_1b").given["tp"] == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (OLD_TITAN.replace("tensor_parallel_degree", "tensor_parallel_degre"), "training.tensor_parallel_degre: not"),
        (OLD_TITAN.replace("[activation_", "[activations_"), "Did you mean activation_checkpoint.mode"),
        (primus("torchtitan", TITAN_INSIDE.replace("seq_len", "seqlen")), "Did you mean training.seq_len"),
        (SCRIPT.replace("batch-size 1", "batchsize 1"), "micro_batchsize: .* Did you mean micro_batch_size"),
        (primus("megatron", MEGATRON_INSIDE.replace("h: 1024", ": 1024")), "Did you mean seq_length"),
    ],
)
def test_a_mistyped_setting_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserInputError, match=message):
        build(tmp_path, text)


def test_a_setting_of_the_trainer_that_is_like_another_is_listed_as_not_taken(tmp_path: Path) -> None:
    text = OLD_TITAN.replace("[activation", '[parallelism]\npipeline_parallel_schedule_csv = "a.csv"\n[activation')
    assert "parallelism.pipeline_parallel_schedule_csv" in read_lines(build(tmp_path, text))["not taken"]


def test_a_script_with_latent_attention_is_read_for_such_a_model(tmp_path: Path) -> None:
    script = (
        "torchrun pretrain_gpt.py --multi-latent-attention --kv-lora-rank 512 --kv-channels 128 --micro-batch-size 2"
    )
    assert build(tmp_path, script, model="deepseek_v3").given["micro_batch"] == 2
    of_primus = primus("megatron", MEGATRON_INSIDE.replace("}", ", multi_latent_attention: true}"))
    of_primus = of_primus.replace("llama3.1_8B-fp8", "deepseek_v3")  # this file sets the rank
    assert build(tmp_path, of_primus, model="deepseek_v3").given["micro_batch"] == 2


def test_a_model_that_torchtitan_cannot_name_is_taken_and_noted(tmp_path: Path) -> None:
    problem = build(tmp_path, OLD_TITAN, model="llama2_13b")
    assert problem.job.model.layers == 40
    assert read_lines(problem)["not taken"].startswith("training.fsdp_reshard")
    assert problem.reading is not None and "torchtitan has none of model=llama2_13b" in problem.reading.notes[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            SCRIPT.replace("parallel-size 2 --pipe", "parallel-size $TP --pipe"),
            "tensor_model_parallel_size=.TP: the scri",
        ),
        (
            "TP=$2\nrun --tensor-model-parallel-size $TP",
            "tensor_model_parallel_size=.2: the script takes arguments: begin it with `set -- ` and those",
        ),
        (YAML.replace("size: 64", "size: ${BATCH}"), "global_batch_size=.{BATCH}: the script gives it no value"),
        (
            YAML.replace("e2m1", "e2m1\n  --fp4-recipe: mxfp4"),
            "fp4_recipe=mxfp4: unknown precision. Did you mean .* Available: nvfp4",
        ),
        (primus("maxtext", "{}"), "framework=maxtext: not read of Primus. Read: megatron, torchtitan, megatron_bridge"),
        (primus("megatron", "{seq_length: '${LENGTH}'}"), "seq_length=.{LENGTH}: the file gives it no default"),
        (
            primus("megatron", "{patch_primus_pipeline: true, pp_algorithm: zero-bubble-heuristic}"),
            "pp_algorithm=zero-bubble-heuristic: no layout has",
        ),
        (primus("megatron_bridge", "{peft: lora}"), "peft=lora: training of adapters is not planned"),
        (RECIPE.replace("_pretrain_", "_peft_"), "recipe=llama3_8b_peft_config: training of adapters is not planned"),
        (RECIPE.replace("--lr 1e-4", "--mode lora"), "mode=lora: training of adapters is not planned"),
        (RECIPE.replace("-tp 2", "-tp $TP"), "tensor_model_parallel_size=.TP: the script gives it no value"),
        (
            'for A in 1 2; do B="run_recipe.py -tp $A"; bash -c "$B"; done; run_recipe.py $B',
            "a loop or a condition gives",
        ),
        (SCRIPT.replace("pretrain_gpt", "pretrain_t5"), "pretrain_t5.py: its model is not a decoder"),
        ('if [ $A = 1 ]; then B="--num-layers 2"; fi\nrun $B', "has arguments of Megatron-LM only under conditions"),
    ],
)
def test_a_value_that_is_not_known_is_refused_by_name(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserInputError, match=message) as refusal:
        build(tmp_path, text)
    assert "\n" not in str(refusal.value)


def test_the_last_of_several_commands_is_read_and_others_are_noted(tmp_path: Path) -> None:
    again = (
        SCRIPT + 'TRAIN+=(--seq-length 1024)\nsource other.sh\nsrun bash -c "python a.py ${TRAIN[*]} --num-layers 32"'
    )
    problem = build(tmp_path, again)
    assert problem.job.sequence_length == 1024 and problem.reading is not None
    first, second = problem.reading.notes
    assert first == "source other.sh: another file, which is not read"
    assert second == "2 commands train: the last one is read"


@pytest.mark.parametrize(("layers", "checkpointing"), [(0, "none"), (2, "full")])
def test_a_block_of_no_layers_recomputes_nothing(tmp_path: Path, layers: int, checkpointing: str) -> None:
    settings = "{seq_length: 1024, recompute_granularity: full, recompute_method: block, recompute_num_layers: LAYERS}"
    given = build(tmp_path, primus("megatron", settings.replace("LAYERS", str(layers)))).given
    assert (given["checkpointing"], given.get("checkpointed_layers")) == (checkpointing, layers or None)


def test_the_arguments_of_a_script_are_those_that_it_begins_with(tmp_path: Path) -> None:
    script = 'if [ "$1" = 8B ]; then LAYERS=32; else LAYERS=80; fi\nrun --num-layers $LAYERS --micro-batch-size ${2}'
    problem = build(tmp_path, f"set -- 8B 4\n{script}")
    assert problem.reading is not None and problem.reading.sizes["layers"] == 32 and problem.given["micro_batch"] == 4


def test_primus_replicates_fsdp2_and_names_its_schedule(tmp_path: Path) -> None:
    replicas = "{use_torch_fsdp2: true, data_parallel_replicate_degree: 2, seq_length: 1024, micro_batch_size: 1}"
    given = build(tmp_path, primus("megatron", replicas)).given
    assert (given["sharding"], given["dp_replicate"], given["dp_shard"]) == ("fsdp2", 2, 8)
    schedule = "{patch_primus_pipeline: true, pp_algorithm: zero-bubble, pipeline_model_parallel_size: 2}"
    problem = build(tmp_path, primus("megatron", schedule.replace("}", ", global_batch_size: 64}")))
    assert problem.given["schedule"] == "zero_bubble"
    job = replace(problem.job, layout=replace(problem.job.layout, **problem.given))
    assert find_violation(job, problem.cluster) is None


def test_an_eager_trainer_is_planned_eager() -> None:
    words = ["model=llama3_8b", "hardware=h100", "gpus=8"]
    compiled = {
        name: build_problem(read_request([*words, f"trainer={name}"])).job.compiled
        for name in ("torchtitan", "llm-foundry")
    }
    assert compiled == {"torchtitan": True, "llm-foundry": False}
