"""The two import rules, and that nothing of this workplace's neighbours is known to the program."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY, environment

FORBIDDEN = {
    "sweeper": {"torch"},
    "workloads": {"ray", "optuna", "mlflow", "hydra", "omegaconf", "sweeper"},
}


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.split(".")[0])
    return found


@pytest.mark.parametrize("room", FORBIDDEN)
def test_no_room_imports_what_it_must_not_know(room: str) -> None:
    files = list((REPOSITORY / room).rglob("*.py"))
    assert files
    wrong = {str(path): bad for path in files if (bad := imports(path) & FORBIDDEN[room])}
    assert not wrong


def test_the_driver_does_not_load_torch_by_a_detour() -> None:
    code = "import sys, sweeper.sweep, sweeper.__main__; print('torch' in sys.modules, 'mlflow' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment(), check=True)
    assert done.stdout.split() == ["False", "False"]
