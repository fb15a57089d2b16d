"""Generate the reference of keys, metrics, workloads, hardware, commands, exit codes and variables from the code.

    python docs/generate.py

Two comments enclose the generated part of each page. `tests/test_docs.py` fails if a page differs from the code.
"""

import html
import re
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

from sweeper.cli import exits
from sweeper.cli.arguments import FLAGS, parse_arguments
from sweeper.cli.command import SUBCOMMANDS
from sweeper.cli.help_page import TEXTS, sweep_rows, workload_rows
from sweeper.cli.sources import GROUPS, compose_groups, list_choices, loaded_files
from sweeper.config.catalogue import catalogue, list_figures
from sweeper.config.resolution import CONF
from workloads.api import registry
from workloads.api.metrics import ROWS

REFERENCE = Path(__file__).parent / "reference"
PART = re.compile(r"(<!-- generated: python docs/generate.py -->\n\n).*?(\n\n<!-- end -->)", re.DOTALL)


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(re.sub(r"\| +(?=\|)", "| ", f"| {' | '.join(cells)} |") for cells in lines)


def described(pairs: Iterable[tuple[str, str]], name: str = "key") -> str:
    """Return a table of names with their meanings. The meanings are plain text."""
    return table((name, "meaning"), ((f"`{key}`", plain(meaning)) for key, meaning in pairs))


def plain(text: str) -> str:
    return re.sub(r"([|*])", r"\\\1", html.escape(" ".join(text.split()), quote=False))


def keys() -> str:
    arguments = parse_arguments([])
    groups = ((group, ", ".join(list_choices(arguments, group))) for group in GROUPS)
    flags = ((", ".join(names), meaning) for names, _, meaning in FLAGS)
    rows = sweep_rows(compose_groups(arguments), loaded_files(arguments))
    parts = (
        ("Of a sweep", described(rows)),
        ("The space", plain(TEXTS["space"])),
        ("Groups", described(groups, "group")),
        ("Flags", described(flags, "flag")),
    )
    return "\n\n".join(f"## {heading}\n\n{text}" for heading, text in parts)


def metrics() -> str:
    head = ("metric", "unit", "better", "resolution", "derived from", "needs")
    resolutions = (f"{metric.resolution:.1%}" if metric.direction else "" for metric in ROWS)
    return table(
        head,
        (
            (f"`{metric.name}`", metric.unit, metric.direction, resolution, metric.source, metric.needs or "")
            for metric, resolution in zip(ROWS, resolutions, strict=True)
        ),
    )


def workloads() -> str:
    parts = []
    for name, presets in find_presets().items():
        module = import_module(type(registry.load(name)).__module__)
        texts = [(preset, preset_text(preset)) for preset in presets]
        arguments = parse_arguments([f"workload={presets[0]}"])
        rows = workload_rows(compose_groups(arguments), loaded_files(arguments))
        summary = plain((module.__doc__ or "").partition("\n")[0].partition(": ")[2])
        parts += [f"## {name}", f"{summary[:1].upper()}{summary[1:]}"]
        parts += [
            described(texts, "workload="),
            f"Keys, with the defaults of `workload={presets[0]}`:",
            described(rows),
        ]
    return "\n\n".join(parts)


def find_presets() -> dict[str, list[str]]:
    """Return the workloads' names, each mapped to the presets that run it."""
    running: dict[str, list[str]] = {name: [] for name in registry.names()}
    for path in sorted((CONF / "workload").glob("*.yaml")):
        if match := re.search(r"^workload:\s*\{?\s*name: *(\w+)", path.read_text(), re.MULTILINE):
            running[match[1]].append(path.stem)
    return running


def preset_text(preset: str) -> str:
    """Return the comment at the beginning of a preset's file."""
    lines = (CONF / "workload" / f"{preset}.yaml").read_text().splitlines()[1:]
    comment = lines[: next(number for number, line in enumerate(lines) if not line.startswith("#"))]
    return " ".join(line.lstrip("# ") for line in comment)


def hardware() -> str:
    rows = (
        (f"`{gpu.name}`" if not number else "", *figure)
        for gpu in catalogue().values()
        for number, figure in enumerate(list_figures(gpu))
    )
    return table(("GPU", "kind", "figures", "source"), rows)


def environment() -> str:
    """Return a table of the default environment variables of workers, with the GPUs to which each default applies."""
    kinds: dict[tuple[str, ...], list[str]] = {}
    for gpu in catalogue().values():
        for name, default in gpu.environment.items():
            row = (f"`{name}`", *(plain(str(default[key])) for key in ("value", "reason", "source")))
            kinds.setdefault(row, []).append(f"`{gpu.name}`")
    return table(("variable", "value", "reason", "source", "GPUs"), ((*row, ", ".join(kinds[row])) for row in kinds))


def commands() -> str:
    parts = []
    for name in SUBCOMMANDS:
        module = import_module(f"sweeper.commands.{name}.main")
        parts += [f"## {name}", page_text(module.__doc__ or "")]
        command: Any = getattr(module, "COMMAND", None)  # `function` has none: it takes the keys of a sweep
        for verb in command.verbs if command else ():
            parts += [f"### `{command.usage(verb)}`", described(command.describe(verb).items())]
    return "\n\n".join(parts)


def page_text(text: str) -> str:
    """Return a module's help in Markdown. The examples in the help are already indented, as Markdown requires."""
    blocks = text.strip().split("\n\n")
    return "\n\n".join(block if block.startswith("    ") else html.escape(block, quote=False) for block in blocks)


def exit_codes() -> str:
    source = Path(exits.__file__).read_text()
    rows = re.findall(r"^[A-Z_]+ = (\d+)  # (.+)$", source, re.MULTILINE)
    return table(("code", "meaning"), rows)


PAGES: dict[str, Callable[[], str]] = {
    "keys.md": keys,
    "metrics.md": metrics,
    "workloads.md": workloads,
    "hardware.md": hardware,
    "commands.md": commands,
    "exit-codes.md": exit_codes,
    "environment.md": environment,
}


def render(page: str) -> str:
    """Return a page with its generated part updated from the current code."""
    text = (REFERENCE / page).read_text()
    assert PART.search(text), f"{page} has no part that is generated"
    part = PAGES[page]()
    return PART.sub(lambda match: f"{match[1]}{part}{match[2]}", text)


if __name__ == "__main__":
    for page in PAGES:
        (REFERENCE / page).write_text(render(page))
