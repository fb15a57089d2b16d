"""The examples of the documentation run as they are, and its reference is that of the code."""

import ast
import json
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from docs import generate, picture_sources
from sweeper.cli.command import SUBCOMMANDS
from sweeper.config.resolution import CONF
from sweeper.metrics.derivation import derive
from tests.conftest import PYTHONPATH, REPOSITORY, CommandResult, Workspace, environment
from workloads.api import registry
from workloads.api.contract import Energy, Measurement

GUIDES = "\n".join((REPOSITORY / f"docs/guides/{name}.md").read_text() for name in ("trainer", "workload"))
# Each block of code is a whole file, whose name stands in its first or second line.
FILES = {
    name: text for text, name in re.findall(r"```\w+\n((?:# @package _global_\n)?# (\S+)\n.+?)```", GUIDES, re.DOTALL)
}


def write_example(folder: Path, name: str, text: str | None = None) -> Path:
    """Write a file of the page, or another text under its name."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text or FILES[name])
    return path


@pytest.fixture
def example_package(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    """The page's workload, installed with its entry point, and its YAML file."""
    write_example(workspace.path, "mytool/bandwidth.py")
    write_example(workspace.path, "mytool-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: mytool\nVersion: 1\n")
    package = tomllib.loads(FILES["pyproject.toml"])
    assert package["tool"]["setuptools"] == {"packages": ["mytool"]}  # else pip refuses two folders in one package
    ((name, place),) = package["project"]["entry-points"]["sweeper.workloads"].items()
    write_example(workspace.path, "mytool-1.dist-info/entry_points.txt", f"[sweeper.workloads]\n{name} = {place}\n")
    write_example(workspace.path, "my_conf/workload/bandwidth.yaml")
    monkeypatch.setenv("PYTHONPATH", str(workspace.path))
    return workspace


def test_a_bandwidth_workload_takes_few_lines() -> None:
    python = [line for line in FILES["mytool/bandwidth.py"].splitlines() if line.strip()]
    yaml = [line for line in FILES["my_conf/workload/bandwidth.yaml"].splitlines() if line.strip()]
    assert len(python) <= 45 and len(yaml) <= 5


@pytest.mark.long(15)
def test_the_example_workload_runs_and_its_bandwidth_is_derived(example_package: Workspace) -> None:
    arguments = ("--config-dir", "my_conf", "workload=bandwidth", "search=grid", "hardware=cpu", "finals.top=0")
    result = example_package.run(*arguments)
    assert result.code == 0 and "3 complete" in result.out, result.out + result.err
    runs = example_package.runs("trial")
    for run in runs:
        moved_gb = 2 * int(run.data.params["mib"]) * 2**20 / 1e9
        assert run.data.metrics["gb_per_s"] == pytest.approx(moved_gb / run.data.metrics["step_time_ms"] * 1e3)


def test_the_example_workload_passes_its_test(example_package: Workspace) -> None:
    path = {"PYTHONPATH": f"{PYTHONPATH}:{example_package.path}"}
    file = write_example(example_package.path, "tests/test_bandwidth.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--rootdir={file.parent}", str(file)]
    result = subprocess.run(command, env=environment() | path, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0 and "1 passed" in result.stdout, result.stdout + result.stderr


TUNER = ("--config-dir", "my_conf", "workload=tuner", "search=grid", "finals.top=0", "hardware=cpu")


@pytest.fixture
def example_command(workspace: Workspace) -> Workspace:
    """The page's YAML file of a command, and a program in the place of its trainer."""
    script = "import sys, time\nfor n in range(20):\n    print(f'loss={9 / (n + 1):.3f} took 5.0 ms', flush=True)\n"
    train = write_example(workspace.path, "train.py", script)
    name = "my_conf/workload/tuner.yaml"
    write_example(workspace.path, name, FILES[name].replace("/home/me/train.py", str(train)))
    return workspace


def test_the_example_command_is_accepted(example_command: Workspace, run_cli: Callable[..., CommandResult]) -> None:
    result = run_cli(*TUNER, "plan=true")
    assert result.code == 0 and "(6 points)" in result.out, result.out + result.err
    assert "train.py --workers=2 --batch=8\n" in result.out


@pytest.mark.soak  # `make test` runs a command like it in tests/workloads/command/test_command.py
def test_the_example_command_runs(example_command: Workspace) -> None:
    result = example_command.run(*TUNER)
    assert result.code == 0 and "6 complete" in result.out, result.out + result.err


# ── commands that pages show ──


def shown_commands(page: Path, *, refused: bool = False) -> list[list[str]]:
    """Return the arguments of the commands that a page shows, or shows as refused, without those with a placeholder."""
    lines = re.findall(
        r"^    python -m sweeper(.*?)(?: +# ?(.*))?$", page.read_text().replace("\\\n", " "), re.MULTILINE
    )
    lines = [line for line, comment in lines if comment.startswith("refused") == refused]
    return [shlex.split(line) for line in lines if not re.search(r"\.\.\.|…|\b[A-Z]{4,}\b(?!_)", line)]


def is_planned(words: list[str]) -> bool:
    return bool(words) and words[0] not in SUBCOMMANDS and not {"-m", "--config-dir"} & {*words}


PAGES = [path for folder in ("guides", "concepts", "reference") for path in (REPOSITORY / "docs" / folder).glob("*.md")]
SHOWN = {" ".join(words): words for page in sorted(PAGES) for words in shown_commands(page) if is_planned(words)}
REFUSED = [words for page in sorted(PAGES) for words in shown_commands(page, refused=True)]


@pytest.mark.soak
def test_a_sweep_that_a_page_shows_as_refused_is_refused(run_cli: Callable[..., CommandResult]) -> None:
    assert REFUSED and all(run_cli(*words).code == 2 for words in REFUSED)


@pytest.mark.soak
@pytest.mark.parametrize("command", SHOWN)
def test_a_sweep_that_a_page_shows_is_accepted(command: str, run_cli: Callable[..., CommandResult]) -> None:
    words = [word for word in SHOWN[command] if not word.startswith("cluster.address=")]
    hardware = [] if "hardware=" in command else ["hardware=h200"]
    result = run_cli(*words, *hardware, "plan=true")
    assert result.code == 0, result.out + result.err


@pytest.mark.soak
def test_the_commands_of_the_first_sweep_and_of_its_results_run_on_a_cpu(workspace: Workspace) -> None:
    guides = REPOSITORY / "docs" / "guides"
    for words in [*shown_commands(guides / "first-sweep.md"), *shown_commands(guides / "results.md"), ["report"]]:
        result = workspace.run(*words, timeout_s=600)
        busy = is_planned(words) and "inconclusive" in result.out  # other processes held the CPU: exit code 1
        assert result.code == 0 or (busy and result.code == 1), result.out + result.err
    assert (workspace.path / "sweeps/report.html").exists()


# ── metrics ──


def documented_metrics() -> tuple[set[str], tuple[str, ...], tuple[str, ...]]:
    """Return the names in docs/reference/metrics.md, and those that are a prefix or a suffix with `…`."""
    names = set(re.findall(r"`([^`]+)`", (REPOSITORY / "docs/reference/metrics.md").read_text()))
    prefixes = tuple(name.removesuffix("…") for name in names if name.endswith("…"))
    suffixes = tuple(name.removeprefix("…") for name in names if name.startswith("…"))
    return names, prefixes, suffixes


def is_documented(metric: str) -> bool:
    names, prefixes, suffixes = documented_metrics()
    return metric in names or metric.startswith(prefixes) or metric.endswith(suffixes)


def literal_metrics(path: Path) -> set[str]:
    """Return the string keys that a workload's file writes into its metrics: dict literals and subscripts."""
    keys: list[ast.expr | None] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.keyword) and node.arg == "metrics":
            keys += [key for inner in ast.walk(node.value) if isinstance(inner, ast.Dict) for key in inner.keys]
        elif isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if isinstance(target, ast.Subscript) and ast.unparse(target.value) == "metrics":
                    keys.append(target.slice)
                elif ast.unparse(target) == "metrics" and node.value is not None:
                    keys += [key for inner in ast.walk(node.value) if isinstance(inner, ast.Dict) for key in inner.keys]
    return {key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)}


def derived_metrics() -> set[str]:
    """Return the names of every metric that can be derived."""
    measurement = Measurement(
        executed={},
        step_times_s=(1.0, 1.1, 1.2),
        sustained_step_times_s=(1.0, 1.1, 1.2),
        independent=True,
        baseline_step_times_s=(2.0, 2.1, 2.2),
        bytes_per_step=1e9,
        flops_per_step=1e12,
        hardware_flops_per_step=2e12,
        tokens_per_step=100,
        matrix_dtype="bf16",
        energy=Energy(100.0, 1.0, 3, "counter"),
    )
    return set(derive([measurement] * 2, {"bf16": 100.0}, {"bf16": 80.0}, bandwidth_tb_s=1.0))


@pytest.mark.parametrize("page", generate.PAGES)
def test_the_reference_is_what_the_code_has(page: str) -> None:
    """To update the page, run `python docs/generate.py`."""
    assert (generate.REFERENCE / page).read_text() == generate.render(page)


def test_every_derived_metric_is_documented() -> None:
    names = derived_metrics()
    assert {"mfu_sustained", "hfu", "bandwidth_utilization", "tokens_per_s_per_gpu", "gpu_spread"} <= names
    assert not {name for name in names if not is_documented(name)}


@pytest.mark.parametrize(
    "workload", sorted({type(registry.load(name)).__module__.split(".")[1] for name in registry.names()})
)
def test_every_metric_that_a_workload_reports_is_documented(workload: str) -> None:
    names = set[str]().union(*map(literal_metrics, (REPOSITORY / "workloads" / workload).rglob("*.py")))
    assert not {name for name in names if not is_documented(name)}


def test_shared_metrics_are_documented() -> None:
    names = literal_metrics(REPOSITORY / "workloads/instruments/telemetry.py")
    assert "sm_clock_mhz" in names and not {name for name in names if not is_documented(name)}


# ── configuration and pages ──


def test_every_key_of_the_configuration_has_a_line_of_help() -> None:
    lines = (CONF / "config.yaml").read_text().split("\nname:")[1].split("\nhydra:")[0].splitlines()
    keys = [line for line in lines if re.match(r" *\w+:", line)]
    assert len(keys) > 20 and not [line for line in keys if "#" not in line and not line.rstrip().endswith(":")]


def test_every_workload_and_model_of_a_page_exists() -> None:
    text = "\n".join(path.read_text() for path in (REPOSITORY / "docs").rglob("*.md"))
    for group in ("workload", "model"):
        choices = {path.stem for path in (CONF / group).glob("*.yaml")}
        named = set(re.findall(rf"python -m sweeper [^\n`]*(?<![\w-]){group}=(\w+)(?![\w/.])", text)) - {
            "tuner",
            "bandwidth",
        }
        assert named <= choices


@pytest.mark.parametrize("page", [path.name for path in REPOSITORY.glob("*.md")])
def test_the_links_of_a_page_lead_to_files(page: str) -> None:
    """Of the pages in docs/ `tests/test_site.py` checks them."""
    links = re.findall(r"\]\(([^)#:]+)\)", (REPOSITORY / page).read_text())
    assert not [link for link in links if not (REPOSITORY / link).exists()]


def test_the_citation_has_the_version_of_the_package() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    citation = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text())
    assert (citation["version"], citation["license"]) == (project["version"], project["license"])


def test_the_readme_is_short() -> None:
    assert len((REPOSITORY / "README.md").read_text().splitlines()) <= 120


def test_no_picture_is_older_than_the_interface_that_it_shows() -> None:
    drawn, now = json.loads(picture_sources.DIGESTS.read_text()), picture_sources.digest_sources()
    changed = [kind for kind in now if drawn.get(kind) != now[kind]]
    assert not changed, f"draw the pictures of {', '.join(changed)} again: make pictures"
