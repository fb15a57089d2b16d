"""Every example runs in an empty directory and prints its result."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY, environment

EXAMPLES = REPOSITORY / "examples"
# What each example prints, and the files that it leaves. CI runs those that take the least time.
PRINTED = {
    "matmul.sh": ("8 complete[^$]+finals [^$]+winner ", ["matmul.html", "sweeps/matmul/best/sweep.sh"]),
    "offload.sh": ("11,000[^$]+device_gib=40[^$]+4 complete", ["sweeps/offload/trials.csv"]),
    "layouts.sh": ("excluded points[^$]+4 complete[^$]+winner ", ["sweeps/layouts/plan.csv"]),
    "plan.sh": ("11.67 B[^$]+sh sweeps/megatron.sh[^$]+h200", ["plan.html", "sweeps/megatron.sh"]),
    "trainer.sh": (
        r"read +step 1: loss=5\.545 tokens_per_s=\d+[^$]+4 complete[^$]+with 2\.39 loss at lr=0\.1 batch=1024",
        ["sweeps/trainer/trials.csv"],
    ),
    "own_workload.py": ("3 complete[^$]+winner .+ GB/s .+ piece_kib=", ["sweeps/add/best/best.json"]),
    "two_objectives.py": (
        r"param\.batch +tokens_per_s +step_time_ms\ntrial +\n\d+ +\d+ ",
        ["sweeps/inference/trials.csv"],
    ),
    "gate.sh": ("slower, -[^$]+ended with 1", ["performance.json", "gate.xml", "gate.md"]),
}
SHORT = ("plan.sh", "own_workload.py", "trainer.sh")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long(15) if name in SHORT else pytest.mark.soak) for name in PRINTED]
)
def test_an_example_runs(name: str, tmp_path: Path) -> None:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    command = ["sh" if name.endswith(".sh") else "python", str(EXAMPLES / name)]
    result = subprocess.run(command, cwd=tmp_path, env=environment(PATH=path), capture_output=True, text=True)
    printed, files = PRINTED[name]
    assert result.returncode == 0 and re.search(printed, result.stdout), result.stdout + result.stderr
    assert not [file for file in files if not (tmp_path / file).is_file()]


def test_every_example_runs_in_a_test_and_is_short() -> None:
    programs = {
        path.name: path.read_text().splitlines() for path in EXAMPLES.iterdir() if path.suffix in (".sh", ".py")
    }
    assert programs.keys() - {"train.py"} == PRINTED.keys()
    assert not [name for name, lines in programs.items() if len(lines) > 60]
    page = (EXAMPLES / "README.md").read_text()
    assert not [name for name in programs if f"]({name})" not in page]


def test_the_notebook_is_the_executed_program() -> None:
    cells = json.loads((EXAMPLES / "two_objectives.ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    program = re.split(r"^# %%.*\n", (EXAMPLES / "two_objectives.py").read_text(), flags=re.MULTILINE)[1:]
    assert code == [text.strip() for text in program if not text.startswith("# ")]
    outputs = "".join(json.dumps(cell["outputs"]) for cell in cells if cell["cell_type"] == "code")
    assert "4 complete" in outputs and "error" not in outputs
