"""Use Ray to send a sweep's code to nodes that lack it.

Nothing is sent if the sweep is local or all nodes have the same code. Otherwise Ray's `runtime_env` sends the missing
parts: our packages and the user's own workload as `py_modules`, and a command's folder as `working_dir`. A node with
another version of our packages is left out because its libraries match that version.

Ray itself checks that a node and the driver run the same versions of Ray and Python (ray/_private/node.py,
check_version_info)."""

from __future__ import annotations

import subprocess
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import sweeper
from sweeper.config.resolution import ResolvedConfig, list_program_files
from sweeper.execution.code_probe import Code, Question, find_package, read_code
from sweeper.execution.worker import SHIPPED_DIRECTORY
from workloads.api import registry
from workloads.api.errors import UserInputError

PARTS = {"sweeper": "gpu-sweeper", "workload": "the workload's package", "command": "the command's files"}
# Ray excludes the first four by default (ray_constants.RAY_RUNTIME_ENV_DEFAULT_EXCLUDES). The rest hold results.
EXCLUDED = (".git", ".venv", "venv", "__pycache__", "sweeps", "mlflow.db", "mlruns", "mlartifacts")
# Ray's limit for a compressed package (ray/_private/runtime_env/packaging.py, GCS_STORAGE_MAX_SIZE).
LIMIT_BYTES = 512 * 2**20


@dataclass(frozen=True)
class SweepCode:
    """The code that a sweep needs on its nodes, and the parts of it that Ray sends to all nodes."""

    entry_point: EntryPoint | None = None  # the entry point of a third-party workload
    directory: str = ""  # where a command runs
    files: tuple[str, ...] = ()  # the files in `directory` that the command names
    sent: frozenset[str] = frozenset()

    @classmethod
    def of_sweep(cls, resolved: ResolvedConfig) -> SweepCode:
        entry_point = registry.find_entry_point(resolved.config.workload.name)
        if (settings := resolved.settings) is None:
            return cls(entry_point)
        files = tuple(word for word in list_program_files(settings) if not Path(word).is_absolute())
        return cls(entry_point, str(Path(settings["directory"])), files)

    @property
    def question(self) -> Question:
        point = self.entry_point
        return None if point is None else (point.group, point.name, point.value), self.directory, self.files

    @cached_property
    def local(self) -> Code:
        return read_code(*self.question)

    @property
    def request(self) -> tuple[Question, str | None]:
        """The first two arguments to pass to `code_probe.probe`."""
        return self.question, None if "sweeper" in self.sent else self.local["sweeper"]

    def find_version_problem(self, code: Code) -> str:
        """Return why a node with this version cannot take part in the sweep, or an empty string."""
        ours = self.local["version"]
        if code["version"] in ("", ours):
            return ""
        return f"has gpu-sweeper {code['version']}, this sweep runs {ours}; install {ours} there"

    def find_missing(self, code: Code) -> set[str]:
        """Return the parts that the node lacks or has in another version, except those that Ray already sends."""
        return {part for part in PARTS if self.local[part] and code[part] != self.local[part]} - self.sent

    def find_problem(self, code: Code) -> str:
        """Return why a joining node cannot take part in the sweep, or an empty string."""
        missing = self.find_missing(code)
        names = " and ".join(name for part, name in PARTS.items() if part in missing)
        lacks = f"lacks {names}; the same command sends it when it starts again" if missing else ""
        return self.find_version_problem(code) or lacks


def build_runtime_env(code: SweepCode, parts: Iterable[str], scratch: Path) -> dict[str, Any]:
    """Return a Ray `runtime_env` that sends these parts. Raises UserInputError if a folder is too large."""
    modules: list[Path] = []
    if "sweeper" in parts:
        package = Path(sweeper.__file__).parent
        modules += [package, package.parent / "workloads"]
    if "workload" in parts and (entry_point := code.entry_point) is not None:
        # Send the workload's top-level package, and a folder with the metadata that registers the entry point.
        found, distribution = find_package(entry_point.module.partition(".")[0]), entry_point.dist
        assert found is not None and distribution is not None  # the workload was loaded from them
        if found.is_dir():
            check_size(found, f"workload {entry_point.name}")
        metadata = scratch / f"{distribution.name.replace('-', '_')}-{distribution.version}.dist-info"
        metadata.mkdir()
        for name in ("METADATA", "entry_points.txt"):
            (metadata / name).write_text(distribution.read_text(name) or distribution.read_text("PKG-INFO") or "")
        modules += [found, metadata]
    environment: dict[str, Any] = {"excludes": ["__pycache__"]}
    if modules:
        environment |= {"py_modules": [str(module) for module in modules]}
    if "command" in parts:
        check_size(Path(code.directory), "command.directory")
        environment |= {"working_dir": code.directory, "env_vars": {SHIPPED_DIRECTORY: code.directory}}
        environment["excludes"] += [f"/{name}" for name in EXCLUDED]
    return environment


def check_size(directory: Path, name: str) -> None:
    """Raise UserInputError, listing the largest subfolders, if a folder is too large for Ray to send."""
    # List the files that Ray would send. In a git repository, Ray skips ignored files.
    command = ["git", "-C", str(directory), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
        files: Iterable[Path] = [Path(name) for name in listed.split("\0") if name]
    except (OSError, subprocess.SubprocessError):
        files = (path.relative_to(directory) for path in directory.rglob("*"))
    sizes = Counter[str]()
    for file in files:
        if file.parts[0] not in EXCLUDED and (path := directory / file).is_file():
            sizes[file.parts[0]] += path.stat().st_size
    if sizes.total() > LIMIT_BYTES:
        largest = ", ".join(f"{name} ({size / 2**20:,.0f} MiB)" for name, size in sizes.most_common(3))
        raise UserInputError(
            f"{name}={directory}: the nodes lack it, and its {sizes.total() / 2**20:,.0f} MiB are more"
            f" than the {LIMIT_BYTES / 2**20:,.0f} MiB that Ray sends: {largest}."
            " List what trials do not need in .gitignore, or copy the folder to the nodes"
        )
