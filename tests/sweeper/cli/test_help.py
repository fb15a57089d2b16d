"""What --help, --version, --cfg and --info print."""

import re
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from sweeper.cli.arguments import parse_arguments
from sweeper.cli.help_page import render_help, sweep_rows, workload_rows
from sweeper.cli.sources import compose_groups, loaded_files
from sweeper.config.resolution import CONF
from sweeper.config.schema import Config
from tests.conftest import REPOSITORY, CommandResult, Workspace
from workloads.api import registry
from workloads.api.validation import attribute_docs, keys_of

COMMANDS = sorted(path.stem for path in (CONF / "workload").glob("*.yaml") if "name: command" in path.read_text())


def undescribed(rows: list[tuple[str, str]]) -> list[str]:
    return [name for name, text in rows if not re.match(r"[^\[]", text)]


def test_every_key_of_a_sweep_has_a_meaning_and_a_default() -> None:
    arguments = parse_arguments([])
    rows = sweep_rows(compose_groups(arguments), loaded_files(arguments))
    assert undescribed(rows) == []
    keys = {key.name for key in keys_of(Config)} - {"space", "command"}
    assert keys <= dict(rows).keys()
    assert all(re.search(r"(default: .*|required)\]$", text) for name, text in rows if name in keys)
    assert "[seconds; a number, at least 0.001; default: 300]" in dict(rows)["trial.timeout_s"]


@pytest.mark.parametrize("name", registry.names())
def test_every_key_of_a_workload_has_a_meaning(name: str) -> None:
    workload = registry.load(name)
    keys = keys_of(workload.Settings if workload.Settings else workload.Parameters)
    assert [key.name for key in keys if not key.meaning] == []


@pytest.mark.parametrize("workload", COMMANDS)
def test_every_key_of_a_command_has_a_meaning(workload: str) -> None:
    arguments = parse_arguments([f"workload={workload}"])
    rows = workload_rows(compose_groups(arguments), loaded_files(arguments))
    assert rows and undescribed(rows) == []


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_the_help_fits_the_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    text = render_help(parse_arguments(["workload=llama8b", "-m", "seed=1,2"]))
    words = max(len(word) for word in text.split())
    assert max(map(len, text.splitlines())) <= max(min(columns, 100), words + 8)
    assert "space.device_gib" in text and "default: choice(16, 24, 40, 60, 78, 120)" in " ".join(text.split())


def test_the_help_of_a_wrong_group_is_an_error(run_cli: Callable[..., CommandResult]) -> None:
    result = run_cli("workload=matmull", "--help")
    assert result.code == 2 and "Did you mean matmul?" in result.err


def test_the_help_has_examples_flags_and_groups(run_cli: Callable[..., CommandResult]) -> None:
    result = run_cli("--help")
    assert result.code == 0 and result.out.count("python -m sweeper ") >= 4
    samplers = "cmaes, gp, grid, nsga2, qmc, random, tpe"
    for part in ("parallel, precision", "llama3_8b", samplers, "mi300x", "--config-dir"):
        assert part in " ".join(result.out.split()), part


def test_the_version_is_ours(run_cli: Callable[..., CommandResult]) -> None:
    result = run_cli("--version")
    version = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["version"]
    assert result.code == 0 and result.out.startswith(f"sweeper {version}\nPython 3.")
    assert "torch " in result.out


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        ("--cfg job", "budget:\n  trials: 7\n"),
        ("--cfg all", "hydra:\n"),
        ("--cfg hydra", "hydra:\n"),
        ("--cfg job -p budget", "# @package budget\ntrials: 7\n"),
        ("--cfg job --resolve", "experiment: matmul"),
    ],
)
def test_hydras_flags_print_and_start_nothing(flags: str, part: str, run_cli: Callable[..., CommandResult]) -> None:
    result = run_cli("budget.trials=7", *flags.split())
    assert result.code == 0 and part in result.out and result.err == ""


def test_info_prints_and_starts_nothing(tmp_path: Path) -> None:
    """In a process of its own: it sets the log up."""
    result = Workspace(tmp_path).run("--info")
    assert result.code == 0 and "Config search path" in result.out and result.err == ""


def test_a_docstrings_attributes_are_read_by_name() -> None:
    class Documented:
        """Parameters.

        Attributes:
            a, b: two
                lines.
            c: with: a colon.

        Raises:
            ValueError: never.
        """

    assert attribute_docs(Documented) == {"a": "two lines.", "b": "two lines.", "c": "with: a colon."}
    assert attribute_docs(int) == {}


def test_help_on_a_workload_that_is_not_installed_is_one_line(
    run_cli: Callable[..., CommandResult], tmp_path: Path
) -> None:
    file = tmp_path / "conf" / "workload" / "own.yaml"
    file.parent.mkdir(parents=True)
    file.write_text("# @package _global_\nworkload: {name: matmull, objective: tflops, direction: maximize}\n")
    result = run_cli("--config-dir=conf", "workload=own", "--help")
    assert result.code == 2 and "workload.name=matmull: unknown workload" in result.err
    assert "Did you mean matmul?" in result.err and len(result.err.splitlines()) == 1


@pytest.mark.parametrize("rest", ["", "command: null\n"])
def test_help_on_a_command_that_does_not_say_what_to_run_lists_its_keys(
    run_cli: Callable[..., CommandResult], tmp_path: Path, rest: str
) -> None:
    file = tmp_path / "conf" / "workload" / "own.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(f"# @package _global_\nworkload: {{name: command, objective: x, direction: maximize}}\n{rest}")
    result = run_cli("--config-dir=conf", "workload=own", "--help")
    assert result.code == 0 and "command.run" in result.out
