"""One of each of the five things that docs/extending.md adds, in a copy of the tree."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

pytestmark = pytest.mark.xdist_group("extending")

METRIC = 'copies_per_s = { unit = "copies/s", label = "copies", direction = "maximize", speed = 6 }\n'
RULE = """    Rule(
        "tp is one",
        lambda job, site: iter(["tp above one is refused here"] if job.layout.tp > 1 else []),
        frozenset({"torchtitan"}),
    ),
"""
WORKLOAD = '''"""Copies of a list."""

import time
from dataclasses import dataclass, field

from workloads.api.contract import Measurement, Rank, Workload


@dataclass(frozen=True)
class CopyingParameters:
    length: int = field(default=1000, metadata={"min": 1})


class Copying(Workload):
    """Copies a list."""

    name = "copying"
    Parameters = CopyingParameters
    benchmark_version = "copying/1"

    def run(self, parameters: CopyingParameters, rank: Rank) -> Measurement:
        values = [0.0] * parameters.length
        started_s = time.perf_counter()
        copy = list(values)
        step_s = time.perf_counter() - started_s
        return Measurement({"length": len(copy)}, (step_s,), metrics={"copies_per_s": 1 / step_s})
'''
PRESET = "# @package _global_\nworkload: {name: copying, objective: copies_per_s}\nspace: {length: 500}\n"


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the packages with one more metric, rule, GPU, planner row and workload."""
    tree = tmp_path_factory.mktemp("tree")
    for name in ("sweeper", "workloads", "conf", "benchmarks"):
        ignored = shutil.ignore_patterns("__pycache__", *(["results"] if name == "benchmarks" else []))
        shutil.copytree(REPOSITORY / name, tree / name, symlinks=True, ignore=ignored)
    add_line(tree / "workloads/api/metrics.toml", METRIC, before="trial_time_s = ")
    add_line(tree / "workloads/layouts/rules.py", RULE, after="\nRULES = (\n")
    h100 = (tree / "conf/hardware/h100.yaml").read_text()
    changes = {
        "name: .*": "name: h900",
        "accelerators: .*": "accelerators: [NVIDIA-H900]",
        "device_names: .*": 'device_names: ["H900$"]',
        "link_gb_s: .*": "link_gb_s: 200",
    }
    for pattern, line in changes.items():
        h100 = re.sub(f"^{pattern}$", line, h100, flags=re.MULTILINE)
    (tree / "conf/hardware/h900.yaml").write_text(h100)
    rows = tree / "benchmarks/planner_rows.csv"
    rows.write_text(rows.read_text() + rows.read_text().splitlines()[1] + "\n")
    (tree / "workloads/copying").mkdir()
    (tree / "workloads/copying/__init__.py").write_text(WORKLOAD)
    (tree / "conf/workload/copying.yaml").write_text(PRESET)
    return tree


def add_line(path: Path, line: str, *, before: str = "", after: str = "") -> None:
    text = path.read_text()
    assert text.count(before or after) == 1
    path.write_text(text.replace(before or after, f"{line}{before}" if before else f"{after}{line}"))


def run(tree: Path, *words: str, code: int = 0) -> str:
    path = os.pathsep.join(filter(None, [str(tree), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": path, "COLUMNS": "200"}
    command = [sys.executable, *words]
    result = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, timeout=60)
    assert result.returncode == code, result.stderr
    return result.stdout if code == 0 else result.stderr


def test_a_workload_is_a_folder_and_a_metric_is_a_row(tree: Path) -> None:
    shown = run(tree, "-m", "sweeper", "workload=copying", "hardware=cpu", "plan=true")
    assert "one point" in shown and "length=500" in shown
    assert '"copies_per_s"' in run(tree, "-m", "workloads", "copying", "length=5")
    line = "from workloads.api.metrics import get_metric; print(get_metric('copies_per_s').heading)"
    assert run(tree, "-c", line) == "copies copies/s\n"


def test_a_gpu_is_a_file_that_also_plans_and_a_trainers_rule_is_a_row(tree: Path) -> None:
    words = ("-m", "sweeper", "plan", "model=llama3_8b", "hardware=h900", "gpus=8", "trainer=torchtitan")
    assert "8 x h900" in run(tree, *words)
    assert "tp above one is refused here" in run(tree, *words, "tp=2", code=2)


def test_a_planner_row_is_a_line_and_a_command_scores_it(tree: Path) -> None:
    def count(root: Path) -> int:
        families = json.loads(run(root, "benchmarks/planner.py", "--json"))["families"]
        return sum(families[name]["rows"] for name in ("dense", "moe"))

    assert count(tree) == count(REPOSITORY) + 1


def test_the_page_names_the_places_and_these_tests() -> None:
    page = (REPOSITORY / "docs" / "extending.md").read_text()
    places = re.findall(r"`((?:conf|workloads|sweeper|benchmarks|tests)/[\w/.]+)`", page)
    assert len(places) >= 10 and not [place for place in places if not (REPOSITORY / place).exists()]
