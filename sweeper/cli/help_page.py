"""Render the help page: examples, flags, groups, and all keys with meanings, units, allowed values and defaults."""

import platform
import shutil
from dataclasses import MISSING, replace
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

import sweeper
from sweeper.cli.arguments import FLAGS, Arguments
from sweeper.cli.command import SUBCOMMANDS, rows, wrap
from sweeper.cli.explanation import explain
from sweeper.cli.sources import GROUPS, ConfigFile, compose_groups, list_choices, loaded_files
from sweeper.config.resolution import CONF
from sweeper.config.schema import Config
from workloads.api import registry
from workloads.api.errors import UserInputError
from workloads.api.host import version_of
from workloads.api.validation import Key, attribute_docs, build, keys_of
from workloads.tables import read_toml

PACKAGES = ("torch", "ray", "optuna", "mlflow", "hydra-core")
MAX_DEFAULT = 70  # longest displayed default, in characters; longer defaults, such as command lines, are truncated
TEXTS: dict[str, Any] = read_toml(__file__, "help.toml")


def render_help(arguments: Arguments) -> str:
    """Return the help page for the workload in the arguments. Raises UserInputError for an invalid configuration."""
    try:
        composed, files = compose_groups(arguments), loaded_files(arguments)
    except Exception as error:
        raise UserInputError(explain(error, arguments)) from error
    width = min(max(shutil.get_terminal_size().columns, 60), 100)
    title = f"Keys of workload={composed.hydra.runtime.choices.workload}"
    groups = {group: ", ".join(list_choices(arguments, group)) for group in GROUPS}
    flags = {", ".join(names): meaning for names, _, meaning in FLAGS}
    examples = list[str]()
    for command, effect in TEXTS["examples"].items():
        lines = wrap(command, width - 2, "    ").replace("    ", "  ", 1)
        examples += [lines.replace("\n", " \\\n"), wrap(effect, width, "      ")]
    parts = (
        [wrap(TEXTS["header"], width), "Examples:", "\n".join(examples), wrap(TEXTS["resuming"], width)],
        ["Subcommands, each with --help:", rows(SUBCOMMANDS.items(), width)],
        ["Flags:", rows(flags.items(), width)],
        ["Groups and their choices, group=choice:", rows(groups.items(), width)],
        ["Keys of a sweep, key=value:", rows(sweep_rows(composed, files), width)],
        [f"{title}:", wrap(TEXTS["space"], width), rows(workload_rows(composed, files), width)],
    )
    return "\n\n".join(block for part in parts for block in part)


def sweep_rows(composed: DictConfig, files: list[ConfigFile]) -> list[tuple[str, str]]:
    """Return the keys of all sweeps and their meanings, from comments in conf/config.yaml or the schema's docs."""
    main = next(file for file in files if file.path == CONF / "config.yaml")
    comments = main.comments()
    keys = [key for key in keys_of(Config) if key.name not in ("space", "command")]
    # Sort keys in the order of the file. Keys that the file does not set come last in their sections.
    place = {name: number for number, (name, *_) in enumerate(main.entries())}
    last = len(place)
    keys.sort(key=lambda key: (place.get(key.name.partition(".")[0], last), place.get(key.name, last)))
    rows: dict[str, str] = {}
    for key in keys:
        section, _, inner = key.name.partition(".")
        if inner and section not in rows and section in comments:
            rows[section] = comments[section]
        rows[key.name] = _describe(replace(key, meaning=comments.get(key.name, key.meaning)), composed)
    return list(rows.items())


def workload_rows(composed: DictConfig, files: list[ConfigFile]) -> list[tuple[str, str]]:
    """Return the workload's keys and their meanings, from its dataclasses or from comments in its files. The default
    meanings of a command's parameters come from the workload `parallel`, which uses the same layout names."""
    name = composed.workload.name
    if name not in registry.names():
        raise UserInputError(f"workload.name={name}: {registry.unknown_reason(str(name))}")
    workload = registry.load(name)
    layout = attribute_docs(registry.load("parallel").Parameters) if workload.Settings else {}
    comments = {f"space.{name}": meaning for name, meaning in layout.items()}
    comments |= {name: comment for file in files for name, comment in file.comments().items()}
    keys = list(keys_of(workload.Parameters, "space."))
    if settings := workload.Settings:  # `command.run` determines a command's parameters
        try:
            values: Any = OmegaConf.to_container(composed.get("command") or OmegaConf.create(), resolve=False)
            workload = workload.with_settings(build(settings, values, "command."))
            keys = list(keys_of(workload.Parameters, "space."))
        except UserInputError:
            keys = [Key(f"space.{name}", Any, MISSING) for name in composed.get("space") or ()]
        keys += keys_of(settings, "command.")
    keys = [replace(key, meaning=key.meaning or comments.get(key.name, "")) for key in keys]
    return [(key.name, _describe(key, composed)) for key in keys]


def _describe(key: Key, composed: DictConfig) -> str:
    value = OmegaConf.select(composed, key.name, default=key.default)
    value = OmegaConf.to_container(value, resolve=False) if OmegaConf.is_config(value) else value
    if isinstance(value, dict) and value and value.keys() <= {"cpu", "gpu"}:
        return key.describe(", ".join(f"{_format(inner)} on a {kind.upper()}" for kind, inner in value.items()))
    return key.describe("" if value is MISSING else _format(value))


def _format(value: Any) -> str:
    if isinstance(value, str):
        return value or "''"
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6, sort_keys=False).splitlines()[0]
    return text if len(text) <= MAX_DEFAULT else f"{text[:MAX_DEFAULT]}…"


def describe_versions() -> str:
    """Return the versions of sweeper, Python and the main packages without importing the packages."""
    versions = {"Python": platform.python_version()} | {name: version_of(name) for name in PACKAGES}
    others = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    return f"sweeper {sweeper.__version__}\n{others}"
