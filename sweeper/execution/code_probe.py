"""Determine which parts of a sweep's code are present on a node.

Ray sends this module by value (`cluster._request_description`), so a node without our code can run it. For the same
reason, the module imports only the standard library.
"""

import hashlib
import importlib.machinery
import re
import sys
from collections.abc import Collection, Sequence
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path
from typing import Any

CODE = (".py", ".toml", ".csv")  # suffixes of a package's code and of the tables that it reads
SHIPPED = "runtime_resources"  # Ray's folder for unpacked code (ray/_private/node.py)

Question = tuple[tuple[str, str, str] | None, str, tuple[str, ...]]  # the arguments of read_code
Code = dict[str, str]  # the result of read_code


def probe(question: Question, expected: str | None, gpus: int, variables: Collection[str]) -> tuple[Code, Any]:
    """Return digests of this node's code, and a description of the hardware (None if our packages cannot be imported).
    `expected` is the digest of the driver's packages, or None if Ray has sent them to this node."""
    code = read_code(*question)
    if expected is not None and code["sweeper"] != expected:
        return code, None
    from sweeper.execution.node_description import describe_hardware

    return code, describe_hardware(gpus, variables)


def read_code(entry_point: tuple[str, str, str] | None, directory: str, files: Sequence[str]) -> Code:
    """Return a digest of each part of a sweep's code on this machine, ignoring code that Ray has sent.

    The parts are `sweeper` (our packages), `workload` (the top-level package of a third-party workload, found by the
    group, name and value of an `entry_point`) and `command` (`files` in the directory where a command runs). The result
    also contains the `version` of gpu-sweeper. A missing part is an empty string.
    """
    ours = find_package("sweeper")
    workload = ""
    if entry_point is not None:
        points = [point for found in distributions(path=_own_paths()) for point in found.entry_points]
        if any((point.group, point.name, point.value) == entry_point for point in points):
            workload = digest([find_package(entry_point[2].partition(":")[0].partition(".")[0])])
    return {
        "version": read_version(ours) if ours else "",
        "sweeper": digest([ours, ours.parent / "workloads"]) if ours else "",
        "workload": workload,
        "command": digest([Path(directory, file) for file in files]) if files else "",
    }


def find_package(name: str) -> Path | None:
    """Return the folder or file from which a top-level package would be imported, ignoring code that Ray has sent."""
    paths = _own_paths()
    for finder in sys.meta_path:
        is_path_finder = finder is importlib.machinery.PathFinder
        find_spec = getattr(finder, "find_spec", None)
        spec = find_spec(name, paths if is_path_finder else None) if find_spec else None
        if spec is None:
            continue
        places = [*(spec.submodule_search_locations or []), *filter(None, [spec.origin])]
        if found := [Path(place) for place in places if Path(place).exists() and SHIPPED not in Path(place).parts]:
            return found[0]
    return None


def read_version(package: Path) -> str:
    """Return the version in the package `sweeper`, or else the version of the installed distribution."""
    init = package / "__init__.py"
    stated = re.search(r'^__version__ = "(.+)"', init.read_text(), re.MULTILINE) if init.exists() else None
    if stated:
        return stated[1]
    try:
        return version("gpu-sweeper")
    except PackageNotFoundError:
        return "of an unknown version"


def digest(paths: Sequence[Path | None]) -> str:
    """Return a shortened SHA-256 of files and of the code and tables in folders, or "" if a path is missing."""
    content = hashlib.sha256()
    for path in paths:
        if path is None or not path.exists():
            return ""
        files = sorted(f for f in path.rglob("*") if f.suffix in CODE) if path.is_dir() else [path]
        for file in files:
            name = file.relative_to(path).as_posix() if path.is_dir() else file.name
            content.update(f"{name}\0{file.stat().st_size}\0".encode())
            content.update(file.read_bytes())
    return content.hexdigest()[:16]


def _own_paths() -> list[str]:
    return [path for path in sys.path if SHIPPED not in Path(path).parts]
