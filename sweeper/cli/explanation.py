"""Explain errors from Hydra, OmegaConf and the YAML parser in one or two lines: the key, and the allowed values."""

import re
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf import OmegaConf

from sweeper.cli import sources
from sweeper.cli.arguments import Arguments
from sweeper.cli.command import SETTING_NAMES, SYNONYMS
from sweeper.config.space import ALLOWED_FORMS
from workloads.api.errors import UserInputError, describe_os_error, first_line
from workloads.suggestions import hint, nearest, suggest
from workloads.tables import read_toml

MESSAGES: dict[str, Any] = read_toml(__file__, "messages.toml")
SEVERAL_VALUES = re.compile(r"(?:Ambiguous value for argument|Sweep parameters?) '\+*([^']+)'")
UNKNOWN_KEY = re.compile(r"Could not (?:override|delete from config\.) '([^']+)'(?:\.| does not exist)")


class UnknownKey(UserInputError):
    """A key that does not exist in any configuration."""

    def __init__(self, key: str, suggestion: str) -> None:
        super().__init__(f"{key}: unknown key. {suggestion}")
        self.key = key


def explain(error: Exception, arguments: Arguments) -> str:
    """Explain a composition error in one or two lines that name the key or the location. May raise UnknownKey."""
    if isinstance(error, yaml.YAMLError):
        return _explain_yaml(error)
    if isinstance(error, UnicodeDecodeError):
        return _explain_encoding(error, arguments)
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        return _explain_missing(error, arguments)
    if isinstance(error, OSError):
        return describe_os_error(error)
    if isinstance(error, OverrideParseException):
        return _explain_syntax(str(error.override).removeprefix("++"), arguments)
    text = f"{error}\n{error.__cause__ or ''}"
    if text.startswith("In '"):
        return _explain_file(text, arguments)
    if match := SEVERAL_VALUES.search(text):
        advice = "give it one for --cfg and --info" if arguments.flags else "add -m to run one sweep for each"
        split = [o for o in arguments.overrides if re.fullmatch(r"space\.[^=]+=[^()\[\]{}]+,[^()\[\]{}]+", o)]
        if split and not arguments.flags:  # -m would make sweeps of its values, too
            name, _, listed = split[0].partition("=")
            advice += f", with {name}='choice({listed})'"
        key, _, values = match[1].partition("=")
        if key in ("objective", "workload.objective"):
            advice = f"write {key}=[{values}] for their Pareto front, or {advice}"
        return f"{match[1]}: several values; {advice}"
    if match := UNKNOWN_KEY.search(text):
        inner = str(getattr(error.__cause__, "full_key", ""))
        key = inner if inner.startswith(f"{match[1]}.") else match[1]  # the key is inside a mapping
        raise UnknownKey(key, _suggest_key(key, arguments)) from error
    for pattern, replacement in MESSAGES["hydra"]:
        if match := re.search(pattern, text):
            place = sources.locate_text(match[1], arguments) if match[1].startswith("@package") else ""
            return place + match.expand(replacement)
    if "Config group override" in text:
        choices = [f"{group}={choice}" for group, choice in sources.choices_of(arguments).items()]
        parser = OverridesParser.create()
        typed = [text for text in choices if not isinstance(parser.parse_override(text).value(), str)]
        typed += [override for override in arguments.overrides if override.startswith("=")]
        return f"{' '.join(typed)}: must be group=choice with the name of a choice"
    if match := re.search(r"at input '([^']+)'", text):
        return f"{sources.locate_text(match[1], arguments)}{match[1]}: cannot be parsed; a reference is ${{key}}"
    return first_line(Exception(text)) if text.strip() else type(error).__name__


def _explain_yaml(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.reader.ReaderError):
        return f"{sources.display(error.name)}: {error.reason} (character {error.position + 1})"
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    if not isinstance(error, yaml.MarkedYAMLError) or mark is None:
        return first_line(error)
    problem = next((text for part, text in MESSAGES["yaml"].items() if part in str(error.problem)), error.problem)
    begun = error.context_mark if problem == error.problem else None
    context = f" ({error.context} that starts in line {begun.line + 1})" if begun else ""
    return f"{sources.display(mark.name)}:{mark.line + 1}: {problem}{context}"


def _explain_encoding(error: UnicodeDecodeError, arguments: Arguments) -> str:
    for path in sources.chosen_files(arguments):
        content = path.read_bytes()
        try:
            content.decode()
        except UnicodeDecodeError as wrong:
            line = content[: wrong.start].count(b"\n") + 1
            return f"{sources.display(path)}:{line}: byte 0x{content[wrong.start]:02x} is not UTF-8"
    return f"a configuration file is not UTF-8: {error.reason}"


def _explain_missing(error: MissingConfigException, arguments: Arguments) -> str:
    name = str(error.missing_cfg_file)
    group, _, choice = name.partition("/") if name.split("/")[0] in sources.GROUPS else name.rpartition("/")
    options = sorted(error.options or ())
    presets = [name for name in options if group == "workload" and _workload_of(arguments, name) == choice]
    if presets:
        what = f"{choice} is a workload that these presets run: {', '.join(presets)}"
        return f"{group}={choice}: {what}. Choose one of them"
    typed = {other: name for name, others in SYNONYMS.get(group, {}).items() for other in others if name in options}
    meant = typed.get(nearest(choice, [*typed, *options]) or "", choice)
    unknown = f"unknown {group} '{choice}'. {suggest(meant, options)}"
    parent = re.match(r"In '([^']+)'", str(error))
    path = sources.find_file(arguments, parent[1]) if parent and parent[1] != "config" else None
    return f"{sources.display(path)}: defaults: {unknown}" if path else f"{group}={choice}: {unknown}"


def _workload_of(arguments: Arguments, preset: str) -> str | None:
    path = sources.find_file(arguments, f"workload/{preset}")
    try:
        return None if path is None else str(yaml.safe_load(path.read_text())["workload"]["name"])
    except (OSError, KeyError, TypeError, ValueError, yaml.YAMLError):
        return None


def _explain_syntax(override: str, arguments: Arguments) -> str:
    key, _, value = override.partition("=")
    if groups := [group for group in sources.GROUPS if override in sources.list_choices(arguments, group)]:
        return f"{override}: must be group=choice. Did you mean {groups[0]}={override}?"
    if re.fullmatch(r"[a-z]+", override):
        return f"{override}: neither key=value, such as workload=matmul, nor a subcommand. `sweeper` alone runs a sweep"
    if not value or not re.fullmatch(r"[+~]{0,2}[\w.@/:-]+", key):
        return f"{override}: cannot be parsed; must be key=value or group=choice"
    for quote in ("'", '"'):
        if value.count(quote) % 2:
            return f"{override}: cannot be parsed: a quote {quote} is not closed"
    for opening, closing in ("()", "[]", "{}"):
        if value.count(opening) != value.count(closing):
            missing = "closed" if value.count(opening) > value.count(closing) else "opened"
            return f"{override}: cannot be parsed: a bracket {opening}{closing} is not {missing}"
    if key.startswith("space."):
        return f"{override}: cannot be parsed. Allowed: {ALLOWED_FORMS}"
    return f"{override}: cannot be parsed; a value with special characters needs quotes: '{key}=\"{value}\"'"


def _explain_file(text: str, arguments: Arguments) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    _, name, reason = lines[0].split("'", 2)
    path = sources.find_file(arguments, name)
    if path and (problem := sources.ConfigFile(path).problem(is_global=False)):
        return f"{sources.display(path)}:1: {problem}"
    reason = lines[1] if reason.endswith("composing config:") and len(lines) > 1 else reason.lstrip(": ")
    return f"{sources.display(path) if path else name}: {reason}"


def _suggest_key(key: str, arguments: Arguments) -> str:
    composed = sources.compose_groups(arguments)
    del composed.hydra
    values: Any = OmegaConf.to_container(composed, resolve=False)
    section, _, name = key.rpartition(".")
    node: Any = values
    for part in section.split(".") if section else []:
        node = node.get(part) if isinstance(node, dict) else None
    wanted = SETTING_NAMES.get(key, key)
    if inner := [full for full in _flatten(values) if f".{full}".endswith(f".{wanted}")]:  # the section is missing
        return f"Did you mean {inner[0]}? Available: {', '.join(map(str, values))}."
    if isinstance(node, dict):
        return suggest(name, map(str, node), f"{section}." if section else "")
    return f"{hint(key, _flatten(values))} Available: {', '.join(map(str, values))}.".strip()


def _flatten(node: Any, prefix: str = "") -> list[str]:
    """Return all keys that have a value. `{cpu: …, gpu: …}` counts as a value."""
    if not isinstance(node, dict) or node.keys() <= {"cpu", "gpu"}:
        return [prefix]
    return [key for name, inner in node.items() for key in _flatten(inner, f"{prefix}.{name}" if prefix else str(name))]
