"""Files of Megatron-LM's settings: its arguments, Megatron-Bridge's recipe with overrides, and Primus's experiment."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from workloads.api.errors import UserInputError
from workloads.formats.megatron import FP8_RECIPES, NAMES, read_settings, support
from workloads.formats.names import FileReading, RenderedFile, Settings, nodes_of, show, torchrun, write_names
from workloads.formats.torchtitan import FLAVORS
from workloads.layouts.layout import Job

# What a run needs that no layout has: synthetic tokens, twenty steps, a line for each.
RUN: dict[str, Any] = {
    "transformer_impl": "transformer_engine",
    "tokenizer_type": "NullTokenizer",
    "mock_data": True,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "lr": 1e-4,
    "train_iters": 20,
    "eval_iters": 0,
    "log_interval": 1,
    "log_throughput": True,
}

# Megatron-LM's arguments, as a shell script that starts `pretrain_gpt.py`.
SCRIPT = "megatron.sh"
SCRIPT_SUPPORT = support("megatron")
# Arguments whose name differs from the one under which Megatron-LM logs their value: megatron/training/arguments.py.
RENAMED = {"fp8": "fp8-format"}
SWITCHES_OFF = {
    "add_bias_linear": "disable-bias-linear",
    "gradient_accumulation_fusion": "no-gradient-accumulation-fusion",
    "torch_fsdp2_reshard_after_forward": "torch-fsdp2-no-reshard-after-forward",
}
_LAUNCH = re.compile(r"--(nnodes|nproc[-_]per[-_]node)[= ](\d+)")

# Megatron-Bridge's recipe with overrides: what NeMo trains large models with since NeMo 2.
BRIDGE_SCRIPT = "megatron_bridge.sh"
RECIPE = "llama3_8b_pretrain_config"  # the sizes are overridden: any recipe of a Llama is a start
# megatron/bridge/training/mixed_precision.py: registered names.
MIXED_PRECISION = {
    "bf16": "bf16_mixed",
    "fp16": "fp16_mixed",
    "fp8_te_delayed": "bf16_with_fp8_delayed_scaling_mixed",
    "fp8_te_current": "bf16_with_fp8_current_scaling_mixed",
    "fp8_te_blockwise": "bf16_with_fp8_subchannel_scaling_mixed",
    "mxfp8": "bf16_with_mxfp8_mixed",
}
_OF_DDP = (
    *("use_distributed_optimizer", "num_distributed_optimizer_instances", "overlap_grad_reduce"),
    *("overlap_param_gather", "use_megatron_fsdp", "data_parallel_sharding_strategy"),
)
# The section of ConfigContainer, and the name there where it is another one. Others are of `model`.
SECTIONS = {
    **{name: f"train.{name}" for name in ("global_batch_size", "micro_batch_size")},
    **{name: f"ddp.{name}" for name in _OF_DDP},
    **{name: f"optimizer.{name}" for name in ("optimizer_cpu_offload", "use_precision_aware_optimizer")},
    "ckpt_format": "checkpoint.ckpt_format",
    "num_virtual_stages_per_pipeline_rank": "model.virtual_pipeline_model_parallel_size",
    "num_experts": "model.num_moe_experts",
}
# Megatron-LM's arguments that Megatron-Bridge derives, or that its Llama recipe has set.
DERIVED = {"swiglu", "normalization", "group_query_attention", "untie_embeddings_and_output_weights"} | {
    *("max_position_embeddings", "vocab_size", "bf16", "fp16", "fp8", "fp8_recipe")
}
# What the recipe sets, and a layout may not have.
_SET_BY_RECIPE = ("ddp.use_distributed_optimizer", "ddp.overlap_grad_reduce", "ddp.overlap_param_gather")
RECIPE_SETS = dict.fromkeys((*_SET_BY_RECIPE, "model.sequence_parallel"), False)
BRIDGE_RUN = {"train.train_iters": 20, "train.eval_iters": 0, "logger.log_interval": 1, "checkpoint.save": None}


def _list_recipe_obstacles(job: Job) -> Iterator[str]:
    for name, value in {"activation": "swiglu", "positions": "rope", "mlp_bias": False}.items():
        if (given := getattr(job.model, name)) != value:
            yield f"the model's {name}={given} cannot be written: the recipe is of a Llama"
    if job.layout.tp_overlap == "async":
        yield "tp_overlap=async cannot be written: its buffers are set in a recipe of one's own"


BRIDGE = "nemo (Megatron-Bridge)"
BRIDGE_SUPPORT = support("nemo", _list_recipe_obstacles, name=BRIDGE, precision=tuple(MIXED_PRECISION))

# Primus's experiment file: its Megatron trainer with all sizes and degrees as overrides of its modules.
EXPERIMENT = "primus.yaml"
# Primus's models whose sizes a file may leave to it: primus/configs/models/megatron.
MODELS = {
    f"{family}_{size}": FLAVORS["llama3", size]
    for family, sizes in {"llama3": ("8B", "70B"), "llama3.1": ("8B", "70B", "405B")}.items()
    for size in sizes
}
# What Primus's own files set differently from Megatron-LM: primus/configs, language_model.yaml and pre_trainer.yaml.
DEFAULTS: Settings = {
    "use_distributed_optimizer": True,
    "bf16": True,
    "sequence_parallel": True,
    "swiglu": True,
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
    "seq_length": 1024,
    "micro_batch_size": 2,
    "global_batch_size": 16,
}
SWITCHED_OFF = {name: False for name, value in DEFAULTS.items() if value is True}
STAGES = {"zero_bubble": 1, "zbv": 2}  # of a rank, by schedule
_PRIMUS_LAUNCH = re.compile(r"\b(NNODES|GPUS_PER_NODE)=(\d+)")


def _list_schedule_obstacles(job: Job) -> Iterator[str]:
    schedule, given = job.layout.schedule, job.layout.stages_per_rank
    if (stages := STAGES.get(schedule, given)) != given:
        yield f"schedule={schedule} needs stages_per_rank={stages}, not {given}"


PRIMUS_SUPPORT = support("primus", _list_schedule_obstacles)


def render_script(job: Job, gpus: int) -> RenderedFile:
    """Return the script of a canonical job. Raises UserInputError if Megatron-LM cannot express it."""
    SCRIPT_SUPPORT.check(job)
    settings = write_names(job, NAMES) | RUN
    arguments = [word for name, value in settings.items() for word in _argument(name, value)]
    # `validate_args` asks for it on Hopper and before: tensor and context parallelism need one connection so that
    # communication is queued first; FSDP needs more.
    connections = 8 if job.layout.sharding in ("fsdp2", "megatron_fsdp", "zero2") else 1
    words = [*torchrun(gpus), "pretrain_gpt.py", *arguments]
    text = _shell_script(words, "Megatron-LM (core_v0.16.1): run in its folder", connections)
    note = "run it in the folder of Megatron-LM, with Transformer Engine installed"
    return RenderedFile(SCRIPT, text, f"sh {SCRIPT}", (note,))


def _argument(name: str, value: Any) -> list[str]:
    if value is False:
        return [f"--{SWITCHES_OFF[name]}"] if name in SWITCHES_OFF else []
    flag = RENAMED.get(name, name.replace("_", "-"))
    if value is True:
        return [] if name in SWITCHES_OFF else [f"--{flag}"]
    return [f"--{flag}", *value] if isinstance(value, list) else [f"--{flag}={shlex.quote(str(value))}"]


def _shell_script(words: list[str], comment: str, connections: int) -> str:
    command = " \\\n    ".join(words)
    return f"#!/bin/sh\n# {comment}\nexport CUDA_DEVICE_MAX_CONNECTIONS={connections}\nexec {command}\n"


def recognises_script(text: str) -> bool:
    return "--num-layers" in text and ("--micro-batch-size" in text or "--global-batch-size" in text)


def read_script(text: str, gpus: int | None = None) -> FileReading:
    """Return what a script or a list of arguments says. Raises UserInputError if a value is not one of a job's."""
    values: dict[str, list[str]] = {}
    name = ""
    for word in split_words(text):
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            values[name] = [value] if equals else []
        elif name:
            values[name].append(word)
    off = {flag: setting for setting, flag in SWITCHES_OFF.items()}
    renamed = off | {flag: setting for setting, flag in RENAMED.items()}
    settings = {}
    for name, texts in values.items():
        parsed = [parse_value(text) for text in texts]
        given = parsed if len(parsed) > 1 else parsed[0] if parsed else True
        settings[renamed.get(name, name.replace("-", "_"))] = False if name in off else given
    return read_settings(settings, "megatron", _read_gpus(text) or gpus)


def split_words(text: str) -> list[str]:
    """Return the words of a shell script. Raises UserInputError if a quote is not closed."""
    try:
        return shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise UserInputError(f"not a shell command: {error}") from error


def _read_gpus(text: str, launch: re.Pattern[str] = _LAUNCH) -> int | None:
    """Return the GPUs of a command: nodes times those of a node; None if it does not say both numbers."""
    numbers = {name.replace("_", "-"): int(number) for name, number in launch.findall(text)}
    return math.prod(numbers.values()) if len(numbers) == 2 else None


def parse_value(text: str) -> Any:
    """Return a value of Python's as Megatron-LM prints it: a truth value, a number, a list, None, or the text."""
    if text in ("True", "False", "true", "false"):
        return text.lower() == "true"
    if text in ("None", "null", ""):
        return None
    if re.fullmatch(r"-?\d{1,18}", text):
        return int(text)
    if re.fullmatch(r"\['?\w.*\]", text):
        return [parse_value(part.strip().strip("'\"")) for part in text[1:-1].split(",")]
    return text


def render_recipe(job: Job, gpus: int) -> RenderedFile:
    """Return the script of a canonical job. Raises UserInputError if Megatron-Bridge's recipe cannot express it."""
    BRIDGE_SUPPORT.check(job)
    settings = {name: value for name, value in write_names(job, NAMES).items() if name not in DERIVED}
    overrides = RECIPE_SETS | {SECTIONS.get(name, f"model.{name}"): value for name, value in settings.items()}
    overrides |= {
        "model.num_query_groups": job.model.kv_heads,
        "model.vocab_size": job.model.vocabulary,
        "tokenizer.vocab_size": job.model.vocabulary - 1,  # NullTokenizer adds a token
        "model.share_embeddings_and_output_weights": job.model.tied,
        "dataset.seq_length": job.sequence_length,
        "mixed_precision": MIXED_PRECISION[job.precision],
        **BRIDGE_RUN,
    }
    shown = {name: f"[{','.join(value)}]" for name, value in overrides.items() if isinstance(value, list)}
    shown = {name: "null" if value is None else show(value) for name, value in overrides.items()} | shown
    pairs = [shlex.quote(f"{name}={value}") for name, value in shown.items()]
    words = [*torchrun(gpus), "scripts/training/run_recipe.py", f"--recipe={RECIPE}", *pairs]
    text = _shell_script(words, "Megatron-Bridge 0.3.1: run in its folder", connections=1)
    note = "the recipe reads the configuration of meta-llama/Meta-Llama-3-8B from the Hugging Face hub"
    return RenderedFile(BRIDGE_SCRIPT, text, f"sh {BRIDGE_SCRIPT}", ("run it in the folder of Megatron-Bridge", note))


def recognises_recipe(text: str) -> bool:
    return "run_recipe.py" in text


def read_recipe(text: str, gpus: int | None = None) -> FileReading:
    """Return what a command with a recipe says, without what the recipe sets itself. Raises UserInputError."""
    pairs = [word.partition("=") for word in split_words(text) if "=" in word and not word.startswith("-")]
    overrides = {name: parse_value(value) for name, _, value in pairs}
    names = {theirs: ours for ours, theirs in SECTIONS.items()}
    settings = {names.get(name, name.rpartition(".")[2]): value for name, value in overrides.items()}
    settings |= {"swiglu": True, "add_bias_linear": False, "position_embedding_type": "rope"}
    settings["group_query_attention"] = "num_query_groups" in settings
    settings["untie_embeddings_and_output_weights"] = not settings.get("share_embeddings_and_output_weights", False)
    if isinstance(vocabulary := overrides.get("model.vocab_size"), int):
        settings["vocab_size"] = vocabulary - 1
    mixed = str(overrides.get("mixed_precision", "bf16_mixed"))
    ours = next((name for name, theirs in MIXED_PRECISION.items() if theirs == mixed), None)
    if ours is None:
        raise UserInputError(f"mixed_precision={mixed}: not known. Known: {', '.join(MIXED_PRECISION.values())}")
    number_format, recipe = FP8_RECIPES.get(ours, (None, None))
    settings |= {"bf16": ours != "fp16", "fp16": ours == "fp16", "fp8": number_format, "fp8_recipe": recipe}
    return read_settings(settings, "nemo", _read_gpus(text) or gpus)


def render_experiment(job: Job, gpus: int) -> RenderedFile:
    """Return the experiment file of a canonical job. Raises UserInputError if Primus cannot express it."""
    PRIMUS_SUPPORT.check(job)
    nodes, per_node = nodes_of(gpus)
    rank = "" if nodes == 1 else "NODE_RANK=$NODE_RANK MASTER_ADDR=$MASTER_ADDR "
    launch = f"NNODES={nodes} {rank}GPUS_PER_NODE={per_node}"
    command = f"{launch} ./primus-cli direct -- train pretrain --config={EXPERIMENT}"
    overrides = SWITCHED_OFF | write_names(job, NAMES)
    if job.layout.schedule in STAGES:  # zero-bubble schedules reduce gradients after the last backward pass
        overrides |= {
            "patch_zero_bubble": True,
            "enable_zero_bubble": True,
            "zero_bubble_v_schedule": job.layout.schedule == "zbv",
            "overlap_grad_reduce": False,
            "overlap_param_gather": False,
        }
    trainer = {"framework": "megatron", "config": "pre_trainer.yaml", "model": "language_model.yaml"}
    experiment = {"work_group": "sweeper", "user_name": "sweeper", "exp_name": "plan", "workspace": "./output"}
    modules = {"modules": {"pre_trainer": trainer | {"overrides": overrides | RUN}}}
    text = yaml.safe_dump(experiment | modules, sort_keys=False)
    return RenderedFile(EXPERIMENT, f"# Primus: {command}\n{text}", command, ("run it in the folder of Primus",))


def recognises_experiment(text: str) -> bool:
    return "pre_trainer" in text and _find_trainer(text) is not None


def read_experiment(text: str, gpus: int | None = None) -> FileReading:
    """Return what an experiment file says. Raises UserInputError if it is not one with a Megatron trainer."""
    trainer = _find_trainer(text)
    if trainer is None:
        raise UserInputError("not an experiment of Primus with modules.pre_trainer.framework: megatron")
    overrides = dict(trainer.get("overrides") or {})
    for name, value in overrides.items():
        if isinstance(value, str) and (match := re.fullmatch(r"\$\{\w+:(.*)\}", value)):  # with a default: ${NAME:8}
            overrides[name] = yaml.safe_load(match[1])
    name = str(trainer.get("model", "")).removesuffix(".yaml")
    return read_settings(
        {**DEFAULTS, **overrides}, "primus", _read_gpus(text, _PRIMUS_LAUNCH) or gpus, MODELS.get(name)
    )


def _find_trainer(text: str) -> Mapping[str, Any] | None:
    try:
        part = yaml.safe_load(text)
    except yaml.YAMLError:
        return None
    for key in ("modules", "pre_trainer"):
        part = part.get(key) if isinstance(part, dict) else None
    return part if isinstance(part, dict) and part.get("framework", "megatron") == "megatron" else None
