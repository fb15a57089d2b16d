"""Read and write Megatron-LM settings as arguments, Megatron-Bridge recipes with overrides and Primus experiments."""

import math
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import yaml

from workloads.api.errors import UserInputError, first_line
from workloads.api.validation import format_value
from workloads.formats import names
from workloads.formats.megatron import ABSENT, FP8_RECIPES, NAMES, TABLES, V_SETUPS, read_settings, support
from workloads.formats.shell import UNSET, Script, find_unset, show_unset
from workloads.formats.torchtitan import FP8, read_config
from workloads.layouts.layout import SPLIT_SCHEDULES, Job
from workloads.models.model import SIZES, Model

RUN: dict[str, Any] = TABLES["run"]

# Megatron-LM's arguments, as a shell script that starts `pretrain_gpt.py`.
SCRIPT = "megatron.sh"
RENAMED: dict[str, str] = TABLES["renamed"]
SWITCHES_OFF: dict[str, str] = TABLES["switches_off"]
_LAUNCH = re.compile(r"--(nnodes|nproc[-_]per[-_]node)[= ](\d+)(?![\d:])")
# Any of these arguments identifies a text as a Megatron-LM command, and the training command in a script.
_ARGUMENTS = ("--num-layers", "--tensor-model-parallel-size", "--micro-batch-size")
ARGUMENT_IN_TEXT = re.compile(rf"({'|'.join(_ARGUMENTS)})[ =:]")
_YAML_ARGUMENT = re.compile(r"^[ \t]*--[\w-]+:(?:[ \t]|$)", re.MULTILINE)
# Megatron-LM programs that train models other than decoders with attention blocks.
_OTHER_PROGRAM = re.compile(r"(?:^|/)(pretrain_(?:bert|t5|ict|retro|vision\w*|vlm|mamba|hybrid)\.py)$")
# An expansion that stands for several arguments, not for one argument's value.
_SEVERAL = re.compile(r"\[[@*]\]|\$[@*]|ARG|OPT|EXTRA|FLAG", re.IGNORECASE)
NO_VALUE = "the script gives it no value, or only under a condition: write the value into the file"
_POSITIONAL = re.compile(r"\$\{?[1-9]")
OF_ARGUMENTS = "the script takes arguments: begin it with `set -- ` and those of your run"

# A Megatron-Bridge recipe with overrides. NeMo has trained large models with these recipes since NeMo 2.
BRIDGE_SCRIPT = "megatron_bridge.sh"
RECIPE = "llama3_8b_pretrain_config"  # all sizes are overridden, so any Llama recipe works
_BRIDGE: dict[str, Any] = TABLES["bridge"]
MIXED_PRECISION: dict[str, str] = _BRIDGE["mixed_precision"]
SECTIONS: dict[str, str] = _BRIDGE["renamed"] | {
    name: f"{section}.{name}" for section, names in _BRIDGE["sections"].items() for name in names
}
# Settings that the recipe switches on but that a layout may not use.
RECIPE_SETS = dict.fromkeys(_BRIDGE["set_by_recipe"], False)
BRIDGE_RUN = {"train.train_iters": 20, "train.eval_iters": 0, "logger.log_interval": 1, "checkpoint.save": None}
_OF_RECIPE = re.compile(r"_(pretrain|sft|finetune|peft)(?=_)")
OPEN_RECIPE = "the recipe of Megatron-Bridge sets what the file leaves out: here it has Megatron-LM's defaults"
ADAPTERS = "training of adapters is not planned. Planned: none"


def _list_recipe_obstacles(job: Job) -> Iterator[str]:
    for name, value in {"activation": "swiglu", "positions": "rope", "mlp_bias": False}.items():
        if (given := getattr(job.model, name)) != value:
            yield f"the model's {name}={given} cannot be written: the recipe is of a Llama"


BRIDGE_SUPPORT = support(
    "nemo",
    _list_recipe_obstacles,
    name="nemo (Megatron-Bridge)",
    precision=tuple(MIXED_PRECISION),
    sharding=("none", "zero1", "zero2", "megatron_fsdp"),  # settings for FSDP2 are not written
    tp_overlap=("none",),  # a recipe of its own would have to set the buffers
)

# Primus's experiment file: Primus's Megatron trainer, with all sizes and degrees as module overrides.
EXPERIMENT = "primus.yaml"
DEFAULTS: names.Settings = TABLES["primus_defaults"]
NO_MODEL = ("", "language_model.yaml")  # files without a model's sizes
SWITCHED_OFF = {name: False for name, value in DEFAULTS.items() if value is True}
# Primus's torchtitan defaults that differ from torchtitan's: primus/configs/modules/torchtitan/pre_trainer.yaml.
TITAN_DEFAULTS: names.Settings = {"compile.enable": True, "activation_checkpoint.mode": "none"}
_VARIABLE = re.compile(r"\$\{\w+:([^{}]*)\}")
_PRIMUS_LAUNCH = re.compile(r"\b(NNODES|GPUS_PER_NODE)=(\d+)")


SUPPORTS = {"megatron": support("megatron"), "nemo": BRIDGE_SUPPORT, "primus": support("primus")}


def render_script(job: Job, gpus: int) -> names.RenderedFile:
    """Return the script for a canonical job. Raises UserInputError if Megatron-LM cannot express the job."""
    settings = names.write_names(job, NAMES) | RUN
    arguments = [word for name, value in settings.items() for word in _argument(name, value)]
    # `validate_args` requires these connections on Hopper and earlier GPUs. Tensor and context parallelism need one
    # connection to queue communication first; FSDP needs more.
    connections = 8 if job.layout.sharding in ("fsdp2", "megatron_fsdp", "zero2") else 1
    words = [*names.torchrun(gpus), "pretrain_gpt.py", *arguments]
    text = _shell_script(words, "Megatron-LM (core_v0.16.1): run in its folder", connections)
    note = "run it in the folder of Megatron-LM, with Transformer Engine installed"
    return names.RenderedFile(SCRIPT, text, f"sh {SCRIPT}", (note,))


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


def read_script(text: str, gpus: int | None = None, model: Model | None = None) -> names.FileReading:
    """Read a script, a list of arguments or YAML arguments. Raises UserInputError for a value that no job can have."""
    if _YAML_ARGUMENT.search(text):
        settings, left, notes = _read_yaml_arguments(text)
        return _add(read_settings(settings, "megatron", gpus, model), left, notes)
    launch, words, notes = _find_command(text)
    if launch and (other := _OTHER_PROGRAM.search(launch[-1])):
        raise UserInputError(f"{other[1]}: its model is not a decoder of attention blocks, which alone are planned")
    values, left = _list_arguments(words)
    if not values:
        raise UserInputError("the script has arguments of Megatron-LM only under conditions that a run decides")
    reason = OF_ARGUMENTS if _POSITIONAL.search(text) and "set -- " not in text else NO_VALUE
    parsed = {name: [parse_value(word, reason) for word in texts] for name, texts in values.items()}
    settings = _read_switches(parsed)
    launched = _read_gpus(" ".join(launch))
    if gpus and launched not in (None, gpus):
        notes.append(f"the script starts {launched} ranks: gpus={gpus} is given")
    is_whole = settings.keys() >= {"num_layers", "hidden_size", "num_attention_heads"} and not left
    return _add(read_settings(settings, "megatron", gpus or launched, model, ABSENT if is_whole else None), left, notes)


def _add(reading: names.FileReading, left: Iterable[str], notes: Iterable[str]) -> names.FileReading:
    return replace(reading, left=(*reading.left, *left), notes=(*reading.notes, *notes))


def _find_command(text: str) -> tuple[list[str], list[str], list[str]]:
    script = Script(text)
    commands = script.read()
    notes = [
        f"{show_unset(' '.join(command[:2]))}: another file, which is not read"
        for command in commands
        if command[0] in ("source", ".") and len(command) > 1
    ]
    *commands, alone = map(_split_nested, (*commands, [word for words in script.variables.values() for word in words]))
    starting = [words for words in commands if any(word.partition("=")[0] in _ARGUMENTS for word in words)]
    if len(starting) > 1 and any(words != starting[-1] for words in starting):
        notes.append(f"{len(starting)} commands train: the last one is read")
    # A file that contains only arguments, for other scripts to source, starts nothing.
    words = starting[-1] if starting else [*(word for words in commands for word in words), *alone]
    first = next((number for number, word in enumerate(words) if word.partition("=")[0] in _ARGUMENTS), len(words))
    start = max((number + 1 for number, word in enumerate(words[:first]) if word.endswith(".py")), default=0)
    return words[:start], words[start:], notes


def _split_nested(words: Iterable[str]) -> list[str]:
    nested = [Script(word).read() if " --" in word else [[word]] for word in words]
    return [word for commands in nested for command in commands for word in command]


def _list_arguments(words: list[str]) -> tuple[dict[str, list[str]], list[str]]:
    """Return each argument's values as text, and the expansions that stand for unknown arguments."""
    values: dict[str, list[str]] = {}
    name, left = "", list[str]()
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            values[name] = [value] if equals else []
        elif (unset := find_unset(word)) and (_SEVERAL.search(unset) or not name or values[name]):
            left.append(unset)
        elif name:
            values[name].append(word)
    return values, left


def _read_switches(values: Mapping[str, list[Any]]) -> dict[str, Any]:
    off = {flag: setting for setting, flag in SWITCHES_OFF.items()}
    renamed = off | {flag: setting for setting, flag in RENAMED.items()}
    settings = {}
    for name, parsed in values.items():
        given = parsed if len(parsed) > 1 else parsed[0] if parsed else True
        settings[renamed.get(name, name.replace("-", "_"))] = (given is False) if name in off else given
    return settings


def _read_yaml_arguments(text: str) -> tuple[dict[str, Any], list[str], list[str]]:
    try:
        config = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UserInputError(f"not YAML: {first_line(error)}") from error
    values: dict[str, list[Any]] = {}
    left, notes = list[str](), list[str]()
    for name, value in names.flatten(config if isinstance(config, dict) else {}).items():
        _, is_argument, argument = name.rpartition("--")
        if not is_argument:
            left.append(name)
            continue
        value = parse_value(value) if isinstance(value, str) else value
        if isinstance(value, str) and "$" in value:
            value = names.Unset(value, NO_VALUE)
        if argument in values and values[argument] != [value]:
            notes.append(f"{name}={value}: the file has several values of it, the last one is read")
        values[argument] = value if isinstance(value, list) else [value]
    return _read_switches(values), left, notes


def _read_gpus(text: str, launch: re.Pattern[str] = _LAUNCH) -> int | None:
    numbers = {name.replace("_", "-"): int(number) for name, number in launch.findall(text)}
    return math.prod(numbers.values()) if len(numbers) == 2 else None


def parse_value(text: str, no_value: str = NO_VALUE) -> Any:
    """Parse a Python value that Megatron-LM printed. Return a bool, an integer, a list, None, or the text."""
    if find_unset(text) is not None:
        return names.Unset(show_unset(text), no_value)
    if re.fullmatch(r"\['?\w.*\]", text):
        return [parse_value(part.strip().strip("'\"")) for part in text[1:-1].split(",")]
    return names.parse_scalar(text)


def render_recipe(job: Job, gpus: int) -> names.RenderedFile:
    """Return the script for a canonical job. Raises UserInputError if a Megatron-Bridge recipe cannot express it."""
    settings = {name: value for name, value in names.write_names(job, NAMES).items() if name not in _BRIDGE["derived"]}
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
    shown = {name: format_value(value) for name, value in overrides.items()} | shown
    pairs = [shlex.quote(f"{name}={value}") for name, value in shown.items()]
    words = [*names.torchrun(gpus), "scripts/training/run_recipe.py", f"--recipe={RECIPE}", *pairs]
    text = _shell_script(words, "Megatron-Bridge 0.3.1: run in its folder", connections=1)
    notes = ["run it in the folder of Megatron-Bridge"]
    notes += ["the recipe reads the configuration of meta-llama/Meta-Llama-3-8B from the Hugging Face hub"]
    if job.model.rope_factor:
        notes.append(f"the recipe does not scale rotary frequencies, as the model does by {job.model.rope_factor:g}")
    return names.RenderedFile(BRIDGE_SCRIPT, text, f"sh {BRIDGE_SCRIPT}", tuple(notes))


def read_recipe(text: str, gpus: int | None = None, model: Model | None = None) -> names.FileReading:
    """Read a command that uses a recipe, leaving out the recipe's settings. Raises UserInputError without a command."""
    commands = map(_split_nested, Script(text).read())
    *_, command = [[], *(words for words in commands if any("run_recipe.py" in word for word in words))]
    start = next((number for number, word in enumerate(command, 1) if "run_recipe.py" in word), 0)
    flags, overrides = dict[str, Any](), dict[str, Any]()
    for word, following in pairwise([*command[start:], "-"]):
        name, equals, value = word.lstrip("-").partition("=")
        if word.startswith("-"):
            name = name.replace("-", "_")
            value = value if equals else "True" if following.startswith("-") or "=" in following else following
            flags[_BRIDGE["flags"].get(name, name)] = parse_value(value)
        elif equals:
            overrides[name.lstrip("+")] = parse_value(value)
    if not flags | overrides:
        raise UserInputError(
            "run_recipe.py: a loop or a condition gives its words. Write the command that you run alone"
        )
    recipe = str(flags.pop("recipe", None) or flags.pop("model", ""))
    kind, mode = _OF_RECIPE.search(recipe), flags.pop("mode", None)
    if mode in ("lora", "dora") or (kind and kind[1] == "peft"):
        raise UserInputError(f"{f'mode={mode}' if mode else f'recipe={recipe}'}: {ADAPTERS}")
    is_whole = "model.num_layers" in overrides  # as in files that this module writes
    named = None if is_whole else names.find_model(_OF_RECIPE.split(recipe)[0])
    mixed = overrides.pop("mixed_precision", "bf16_mixed")
    logged = {theirs: ours for ours, theirs in SECTIONS.items()}
    settings = flags | {logged.get(name, name.rpartition(".")[2]): value for name, value in overrides.items()}
    implied: dict[str, Any] = {"use_distributed_optimizer": True}  # as in most Megatron-Bridge recipes
    implied |= {"group_query_attention": True} if "num_query_groups" in settings else {}
    is_tied = settings.pop("share_embeddings_and_output_weights", None)
    if is_whole:
        implied = {**_BRIDGE["implied"], **implied}
    if is_whole or is_tied is not None:
        implied["untie_embeddings_and_output_weights"] = not is_tied
    if isinstance(vocabulary := overrides.get("model.vocab_size"), int):
        settings["vocab_size"] = vocabulary - 1
    launched = gpus or _read_gpus(" ".join(command))
    reading = read_settings(settings, "nemo", launched, model or named, implied | _read_mixed(mixed))
    taken = {**reading.taken, "mixed_precision": ("precision", mixed)} | (
        {"recipe": ("model", recipe)} if named else {}
    )
    unknown = f"recipe={recipe}: its sizes are not known here, so model= is not compared with it"
    notes = () if is_whole else (OPEN_RECIPE,) if named else (OPEN_RECIPE, unknown)
    left = [unset for word in command[start:] if word.startswith(UNSET) and (unset := find_unset(word))]
    return _add(replace(reading, taken=taken, sizes={**_sizes_of(named), **reading.sizes}), left, notes)


def _sizes_of(model: Model | None) -> dict[str, int]:
    return {name: getattr(model, name) for name in SIZES} if model else {}


def _read_mixed(mixed: object) -> dict[str, Any]:
    ours = next((name for name, theirs in MIXED_PRECISION.items() if theirs == mixed), None)
    if ours is None:
        raise UserInputError(f"mixed_precision={mixed}: not known. Known: {', '.join(MIXED_PRECISION.values())}")
    number_format, recipe = FP8_RECIPES.get(ours, (None, None))
    return {"bf16": ours != "fp16", "fp16": ours == "fp16", "fp8": number_format, "fp8_recipe": recipe}


def render_experiment(job: Job, gpus: int) -> names.RenderedFile:
    """Return the experiment file for a canonical job. Raises UserInputError if Primus cannot express the job."""
    nodes, per_node = names.nodes_of(gpus)
    rank = "" if nodes == 1 else "NODE_RANK=$NODE_RANK MASTER_ADDR=$MASTER_ADDR "
    launch = f"NNODES={nodes} {rank}GPUS_PER_NODE={per_node}"
    command = f"{launch} ./primus-cli direct -- train pretrain --config={EXPERIMENT}"
    overrides = SWITCHED_OFF | names.write_names(job, NAMES)
    if job.layout.schedule in SPLIT_SCHEDULES:  # zero-bubble schedules reduce gradients last
        overrides |= {
            "patch_zero_bubble": True,
            "enable_zero_bubble": True,
            "zero_bubble_v_schedule": job.layout.schedule in V_SETUPS,
            "zero_bubble_v_schedule_mem_setup": V_SETUPS.get(job.layout.schedule, "zb"),
            "overlap_grad_reduce": False,
            "overlap_param_gather": False,
        }
    trainer = {"framework": "megatron", "config": "pre_trainer.yaml", "model": "language_model.yaml"}
    experiment = {"work_group": "sweeper", "user_name": "sweeper", "exp_name": "plan", "workspace": "./output"}
    modules = {"modules": {"pre_trainer": trainer | {"overrides": overrides | RUN}}}
    text = yaml.safe_dump(experiment | modules, sort_keys=False)
    return names.RenderedFile(EXPERIMENT, f"# Primus: {command}\n{text}", command, ("run it in the folder of Primus",))


def read_experiment(text: str, gpus: int | None = None, model: Model | None = None) -> names.FileReading:
    """Return the job that an experiment file describes. Raises UserInputError if the file has no known trainer."""
    trainer = find_trainer(text)
    if trainer is None:
        raise UserInputError("not an experiment of Primus with a module that has a framework")
    framework, overrides = trainer.get("framework", "megatron"), _fill(trainer.get("overrides") or {})
    if framework not in FRAMEWORKS:
        raise UserInputError(f"framework={framework}: not read of Primus. Read: {', '.join(FRAMEWORKS)}")
    is_lora = lora.get("enabled") if isinstance(lora := overrides.get("lora"), Mapping) else lora
    if (adapters := overrides.get("peft") or ("lora" if is_lora else "none")) != "none":
        raise UserInputError(f"peft={adapters}: {ADAPTERS}")
    file = str(_fill(trainer.get("model", "")))
    named, launched = names.find_model(file), gpus or _read_gpus(text, _PRIMUS_LAUNCH)
    reading = FRAMEWORKS[framework](overrides, file, launched, model or named)
    note = f"model: {file}: its sizes are not known here, so model= is not compared with it"
    reading = _add(reading, (), () if named or file in NO_MODEL else (note,))
    taken = {"model": ("model", file)} if named else {}
    return replace(reading, sizes={**_sizes_of(named), **reading.sizes}, taken={**reading.taken, **taken})


def _read_primus_bridge(
    overrides: names.Settings, file: str, gpus: int | None, model: Model | None
) -> names.FileReading:
    given = {name: value for name, value in overrides.items() if name not in ("peft", "precision_config")}
    mixed = overrides.get("precision_config", "bf16_mixed")
    implied = {"use_distributed_optimizer": True, **_read_mixed(mixed)}
    reading = read_settings(given, "nemo", gpus, model, implied)
    taken = {"precision_config": ("precision", mixed)} if "precision_config" in overrides else {}
    return _add(replace(reading, taken={**reading.taken, **taken}), (), (OPEN_RECIPE,))


FRAMEWORKS: dict[str, Callable[[names.Settings, str, int | None, Model | None], names.FileReading]] = {
    "megatron": lambda overrides, file, gpus, model: read_settings(
        overrides, "primus", gpus, model, {k: v for k, v in DEFAULTS.items() if file in NO_MODEL or k not in ABSENT}
    ),
    "torchtitan": lambda overrides, file, gpus, model: read_config(
        overrides, gpus, model, {**TITAN_DEFAULTS, **({"model.converters": [FP8]} if "fp8" in file else {})}
    ),
    "megatron_bridge": _read_primus_bridge,
}


def _fill(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _fill(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_fill(inner) for inner in value]
    if not isinstance(value, str) or "${" not in value:
        return value
    filled = _VARIABLE.sub(lambda match: match[1], value)
    if "${" in filled:
        return names.Unset(value, "the file gives it no default: write the value into the file")
    try:
        return yaml.safe_load(filled) if _VARIABLE.fullmatch(value) else filled
    except yaml.YAMLError:
        return filled  # such as ([0]*1+[1]*26)


def find_trainer(text: str) -> Mapping[str, Any] | None:
    """Return the module of a Primus experiment that trains, or None if a text is not such an experiment."""
    try:
        config = yaml.safe_load(text)
    except yaml.YAMLError:
        return None
    modules = config.get("modules") if isinstance(config, dict) else None
    named = [part for part in (modules if isinstance(modules, dict) else {}).values() if isinstance(part, dict)]
    return next((part for part in named if "framework" in part), None)
