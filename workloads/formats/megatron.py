"""Megatron-LM's arguments, as a shell script that starts `pretrain_gpt.py`."""

from __future__ import annotations

import re
import shlex
from typing import Any

from workloads.api.errors import UserInputError
from workloads.formats.megatron_reading import read_settings
from workloads.formats.megatron_rules import support
from workloads.formats.megatron_settings import Settings, build_settings
from workloads.formats.rendering import FileReading, RenderedFile, shell_script, torchrun
from workloads.layouts.job import Job

NAME = "megatron.sh"
SUPPORT = support("megatron")
# What a run needs that no layout has: synthetic tokens, twenty steps, a line for each.
RUN: Settings = {
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
# Arguments whose name differs from the one under which Megatron-LM logs their value: megatron/training/arguments.py.
RENAMED = {"fp8": "fp8-format"}
SWITCHES_OFF = {
    "add_bias_linear": "disable-bias-linear",
    "gradient_accumulation_fusion": "no-gradient-accumulation-fusion",
    "torch_fsdp2_reshard_after_forward": "torch-fsdp2-no-reshard-after-forward",
}
_LAUNCH = re.compile(r"--(nnodes|nproc[-_]per[-_]node)[= ](\d+)")


def render(job: Job, gpus: int) -> RenderedFile:
    """Return the script of a canonical job.

    Raises:
        UserInputError: Megatron-LM cannot express it.
    """
    SUPPORT.check(job)
    words = [*torchrun(gpus), "pretrain_gpt.py", *build_arguments(job)]
    comment = "Megatron-LM (core_v0.16.1): run in its folder"
    text = shell_script(words, comment, environment_of(job))
    note = "run it in the folder of Megatron-LM, with Transformer Engine installed"
    return RenderedFile(NAME, text, f"sh {NAME}", (note,))


def build_arguments(job: Job) -> list[str]:
    """Return the arguments of `pretrain_gpt.py`."""
    settings = build_settings(job) | RUN
    return [word for name, value in settings.items() for word in _argument(name, value)]


def environment_of(job: Job) -> dict[str, str]:
    """Return the environment that `validate_args` asks for on Hopper and before.

    Tensor and context parallelism need one connection so that communication is queued first; FSDP needs more.
    """
    layout = job.layout
    if layout.sharding in ("fsdp2", "megatron_fsdp", "zero2"):
        return {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}
    return {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}


def read(text: str, gpus: int | None = None) -> FileReading:
    """Return what a script or a list of arguments says.

    Raises:
        UserInputError: a value that no job has, or the number of GPUs is missing.
    """
    return read_settings(parse_arguments(text), "megatron", read_gpus(text) or gpus)


def recognises(text: str) -> bool:
    """Return whether a text has arguments of Megatron-LM."""
    return "--num-layers" in text and ("--micro-batch-size" in text or "--global-batch-size" in text)


def read_gpus(text: str) -> int | None:
    """Return the GPUs of a command with torchrun; None if it does not say both numbers."""
    launch = {name.replace("_", "-"): int(number) for name, number in _LAUNCH.findall(text)}
    return launch["nnodes"] * launch["nproc-per-node"] if len(launch) == 2 else None


def parse_arguments(text: str) -> Settings:
    """Return the settings of a command's arguments, by the names that Megatron-LM logs.

    Raises:
        UserInputError: a quote is not closed.
    """
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise UserInputError(f"not a shell command: {error}") from error
    values: dict[str, list[str]] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            values[name] = [value] if equals else []
        elif name:
            values[name].append(word)
    off = {flag: setting for setting, flag in SWITCHES_OFF.items()}
    renamed = {flag: setting for setting, flag in RENAMED.items()}
    return {
        off.get(name) or renamed.get(name) or name.replace("-", "_"): False if name in off else _parse_values(texts)
        for name, texts in values.items()
    }


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


def _parse_values(texts: list[str]) -> Any:
    if not texts:
        return True
    return parse_value(texts[0]) if len(texts) == 1 else [parse_value(text) for text in texts]


def _argument(name: str, value: Any) -> list[str]:
    if value is False:
        return [f"--{SWITCHES_OFF[name]}"] if name in SWITCHES_OFF else []
    flag = RENAMED.get(name, name.replace("_", "-"))
    if value is True:
        return [] if name in SWITCHES_OFF else [f"--{flag}"]
    if isinstance(value, list):
        return [f"--{flag}", *value]
    return [f"--{flag}={shlex.quote(str(value))}"]
