"""Files of others run no code: YAML with tags, pickles, imports; and they are read in bounded time and memory."""

import pickle
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sweeper.commands.ingest.main import import_file
from tests.conftest import CommandResult, environment
from workloads.api.errors import UserInputError


class Touch:
    """An object whose unpickling makes a file."""

    def __reduce__(self) -> tuple[Callable[..., object], tuple[Path]]:
        return Path.touch, (Path("executed"),)


YAML = {
    "apply": "seed: !!python/object/apply:os.mkdir [executed]\n",
    "new": "seed: !!python/object/new:os.mkdir [executed]\n",
    "name": "space: {m: !!python/name:os.mkdir }\n",
    "module": "space: !!python/module:antigravity\n",
    "target": "hydra: {sweeper: {_target_: os.mkdir, path: executed}}\n",
    "pickle": pickle.dumps(Touch()).decode("latin-1"),
}
MILLION = 1_000_000
COLUMNS = {
    "a.csv": ",".join(["1"] * MILLION) + "\n",
    "b.csv": ",".join(["1"] * 19) + "\n" + "1," * MILLION + "\n",
    "c.json": '{"platform": "nvd", "gpu_info": {' + ",".join(f'"c{n}": {n}' for n in range(MILLION)) + "}}",
    "d.json": '{"platform": "nvd", "gpu_info": ' + "[" * MILLION,
    "e.log": "iteration 1/2 | " + "a: 1 | " * MILLION + "\n",
    "f.txt": "a,b\n" * MILLION,
}
MEMORY_BYTES = 1 << 30  # of a program that imports them; its libraries take a part


@pytest.mark.parametrize("name", YAML)
def test_a_configuration_runs_no_code(name: str, run_cli: Callable[..., CommandResult], tmp_path: Path) -> None:
    file = tmp_path / "conf" / "workload" / "own.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(f"# @package _global_\n{YAML[name]}", encoding="latin-1" if name == "pickle" else None)
    result = run_cli("--config-dir=conf", "workload=own", "plan=true", "hardware=cpu")
    assert result.code == 2 and len(result.err.splitlines()) <= 2, result.err
    assert not (tmp_path / "executed").exists()


def test_an_import_runs_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.log", "a.csv", "a.json", "a.pkl"):
        Path(name).write_bytes(pickle.dumps(Touch()))
        with pytest.raises(UserInputError, match=r"is not text|unknown format"):
            import_file(Path(name), None, "imported")
    assert not Path("executed").exists()


@pytest.mark.soak
@pytest.mark.parametrize("name", COLUMNS)
def test_a_million_columns_are_refused_in_a_line_and_little_memory(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(COLUMNS[name])
    limits = (MEMORY_BYTES, MEMORY_BYTES)
    result = subprocess.run(
        [sys.executable, "-m", "sweeper", "ingest", name, "--check"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, limits),
    )
    assert result.returncode == 2 and len(result.stderr.splitlines()) == 2, result.stderr[:2000]
    assert len(result.stderr) < 1000 and "refused: " in result.stderr, result.stderr[:2000]
