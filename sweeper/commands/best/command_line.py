"""The command that runs one trial again: a line for a shell, and the same as a YAML file of overrides."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from sweeper.cli.arguments import parse_arguments
from sweeper.common.trials import TrialRecord
from sweeper.config.environment import PREFIX, SECTION, is_variable
from sweeper.config.files import HEADER
from sweeper.config.space import Parameters, Value
from sweeper.results.description import SweepDescription

# What a single trial has no use for, or the trial's own parameters replace. A word that ends in a dot is a section.
REPLACED = (
    *("space.", "search", "search.", "budget.", "finals.", "projection.", "workload.strategy"),
    *("model", "name", "retry", "plan", "progress", "gpus", "hardware"),
)
LISTS = "(,["  # a text with one of them is a list, a choice or a range, unless it is in quotes
PLAIN_TEXT = re.compile(r"[A-Za-z_./][\w./:-]*")
KEYWORDS = ("true", "false", "null", "nan", "inf")


def trial_parameters(description: SweepDescription, record: TrialRecord) -> Parameters:
    """Return every parameter that the sweep's space gives a trial, constants first."""
    return {**description.constants, **record.params}


def command_words(description: SweepDescription, record: TrialRecord) -> list[str]:
    """Return the command that runs the trial alone: the sweep's own, with the trial's parameters as constants."""
    program, words = _split_program(description.arguments)
    arguments = parse_arguments(words)
    kept = [word for word in arguments.overrides if not _is_replaced(word)]
    flags = [f"--config-dir={arguments.config_dir}"] if arguments.config_dir else []
    values = trial_parameters(description, record)
    return [
        *(*program, *flags, *kept),
        *(f"hardware={description.hardware}", f"gpus={description.gpus}"),
        *(f"space.{name}={override_value(name, value)}" for name, value in values.items()),
        *("search=grid", "finals.top=0"),
    ]


def command_line(description: SweepDescription, record: TrialRecord) -> str:
    """Return the command as a person types it in a shell."""
    return shlex.join(command_words(description, record))


def script_line(description: SweepDescription, record: TrialRecord) -> str:
    """Return the command with the interpreter that ran the sweep, whose packages the result belongs to.

    Each start has a name of its own: with the same one it would find its trial done, and measure nothing.
    """
    program, _ = _split_program(description.arguments)
    words = command_words(description, record)[len(program) :]
    command = shlex.join([description.python, "-m", program[-1], *words])
    return f'{command} name="{description.name}-trial{record.number}-$(date -u +%Y%m%dT%H%M%S)"'


def overrides_file(description: SweepDescription, record: TrialRecord, comment: str, folder: Path) -> str:
    """Return the file `workload/best.yaml`: everything that decides what the trial runs.

    It does not depend on the files of conf/workload, which may change, nor on those of the user's own folder. The
    hardware and the sampler stand in the command: Hydra expands the last group first (1.3.8,
    _internal/defaults_list.py), so a file of the first group cannot choose those of later ones.

    Args:
        description: of the sweep.
        record: of the trial.
        comment: which trial it is.
        folder: where `workload/` will lie.
    """
    program, _ = _split_program(description.arguments)
    words = [*program, f"--config-dir={folder}", "workload=best", f"hardware={description.hardware}", "search=grid"]
    config = description.config
    values: dict[str, Any] = {
        "workload": {**config["workload"], "strategy": None},
        "gpus": description.gpus,
        "seed": config["seed"],
        "trial": config["trial"],
        "finals": {"top": 0, "rounds": config["finals"]["rounds"]},
        **({"exclusive": config["exclusive"]} if config["exclusive"] else {}),
        **({"command": _escaped(description.settings)} if description.settings is not None else {}),
        "space": dict(_sections(trial_parameters(description, record))),
    }
    text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=120)
    return f"{HEADER}\n# {comment}\n# {shlex.join(words)}\n{text}"


def override_value(name: str, value: Value) -> str:
    """Return a parameter's value as Hydra's command line reads it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return repr(value)
    if PLAIN_TEXT.fullmatch(value) and value.lower() not in KEYWORDS:
        return value
    if is_variable(name) and "," in value:  # `cli.overrides` adds the outer quotes
        return str(_entry(value))
    return _in_quotes(str(_entry(value)), '"')


def _in_quotes(text: str, mark: str) -> str:
    """Return a text in quotes, as Hydra's grammar has them: backslashes count only before a quote."""
    escaped = re.sub(rf"(\\*)({mark}|$)", lambda match: match[1] * 2 + (f"\\{mark}" if match[2] else ""), text)
    return f"{mark}{escaped}{mark}"


def _entry(value: Value) -> Value:
    """Return a parameter's value as an entry of a space in YAML."""
    if not isinstance(value, str):
        return value
    text = _in_quotes(value, "'") if any(mark in value for mark in LISTS) else value
    return text.replace("${", "\\${")


def _escaped(settings: Any) -> Any:
    """Return settings with their texts escaped: OmegaConf would replace ${…}, which a shell is to see."""
    if isinstance(settings, Mapping):
        return {key: _escaped(value) for key, value in settings.items()}
    if isinstance(settings, (list, tuple)):
        return [_escaped(value) for value in settings]
    return settings.replace("${", "\\${") if isinstance(settings, str) else settings


def _sections(values: Mapping[str, Value]) -> Iterator[tuple[str, Any]]:
    """Yield the entries of a space, the environment variables as its section."""
    variables = {name.removeprefix(PREFIX): _entry(value) for name, value in values.items() if is_variable(name)}
    if variables:
        yield SECTION, variables
    yield from ((name, _entry(value)) for name, value in values.items() if not is_variable(name))


def _split_program(arguments: Any) -> tuple[list[str], list[str]]:
    """Return the words that start the program, and those that it is given."""
    words = list(arguments)
    size = 3 if words[1:2] == ["-m"] else 1
    return words[:size], words[size:]


def _is_replaced(word: str) -> bool:
    key = word.lstrip("+~").partition("=")[0]
    return any(key.startswith(name) if name.endswith(".") else key == name for name in REPLACED)
