"""What docs/workloads.md shows runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sweeper.common.metrics import DISPLAY
from tests.conftest import REPOSITORY, Place

_DISPLAY = re.findall(
    r"```\w+\n((?:# @package _global_\n)?# (\S+)\n.+?)```", (REPOSITORY / "docs/workloads.md").read_text(), re.DOTALL
)
BLOCKS = {name: text for text, name in _DISPLAY}  # whole: what a reader copies


def test_every_figure_of_a_table_is_explained() -> None:
    explained = re.findall(r"`([^`]+)`", (REPOSITORY / "docs/metrics.md").read_text())
    endings = tuple(name.removeprefix("…") for name in explained if name.startswith("…"))
    names = set(DISPLAY) - {"m", "n", "k"}
    assert {name for name in names if not name.endswith(endings)} <= set(explained)


def written(place: Place, name: str, text: str | None = None) -> Path:
    path = place.path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text or BLOCKS[name])
    return path


@pytest.mark.soak
def test_a_command_in_ten_lines(place: Place) -> None:
    script = "import sys, time\nfor n in range(20):\n    print(f'loss={9 / (n + 1):.3f} took 5.0 ms', flush=True)\n"
    train = written(place, "train.py", script)
    written(
        place, "mine/workload/tuner.yaml", BLOCKS["mine/workload/tuner.yaml"].replace("/home/me/train.py", str(train))
    )
    done = place.run("--config-dir", str(place.path / "mine"), "workload=tuner", "search=grid", "finals.top=0")
    assert done.code == 0 and "6 complete" in done.out, done.out + done.err


@pytest.mark.soak
def test_a_workload_of_another_package(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    written(place, "mytool/workload.py")
    written(place, "mytool-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: mytool\nVersion: 1\n")
    entry = re.search(r"(\[project.entry-points.+?)```", (REPOSITORY / "docs/workloads.md").read_text(), re.DOTALL)
    assert entry
    line = entry[1].splitlines()[1].replace('"', "")
    written(place, "mytool-1.dist-info/entry_points.txt", f"[sweeper.workloads]\n{line}\n")
    written(place, "mine/workload/sort.yaml")
    monkeypatch.setenv("PYTHONPATH", str(place.path))
    done = place.run("--config-dir", str(place.path / "mine"), "workload=sort", "budget.trials=3", "finals.top=0")
    assert done.code == 0 and "3 complete" in done.out, done.out + done.err
