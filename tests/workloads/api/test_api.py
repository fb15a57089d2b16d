"""The interface package imports the standard library only."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY, environment

MODULES = [REPOSITORY / f"workloads/{name}.py" for name in ("suggestions", "tables")]
MODULES += sorted((REPOSITORY / "workloads" / "api").rglob("*.py"))
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def module_level_imports(node: ast.AST) -> Iterator[str]:
    """Yield the names of the modules that are imported outside functions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            yield "." * child.level + (child.module or "")
        elif not isinstance(child, FUNCTIONS):
            yield from module_level_imports(child)


def is_allowed(module: str) -> bool:
    """Return whether the module is in the standard library, or in a part of workloads that needs no more.

    The package workloads has no code.
    """
    parts = ("workloads.api.", "workloads.hardware.", "workloads.suggestions.", "workloads.tables.")
    return module.split(".")[0] in sys.stdlib_module_names or module == "workloads" or f"{module}.".startswith(parts)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_a_module_imports_only_the_standard_library_at_module_level(path: Path) -> None:
    not_allowed = [name for name in module_level_imports(ast.parse(path.read_text())) if not is_allowed(name)]
    assert not not_allowed


def test_imports_are_found_at_module_level_and_not_in_functions() -> None:
    text = "import a\ntry:\n    from b.c import d\nexcept ImportError:\n    def f():\n        import e\n"
    assert list(module_level_imports(ast.parse(f"{text}class C:\n    import g"))) == ["a", "b.c", "g"]


def test_importing_every_module_loads_no_third_party_package() -> None:
    """Modules that are loaded before, such as those of .pth files in site-packages, do not count."""
    names = [".".join(path.relative_to(REPOSITORY).with_suffix("").parts) for path in MODULES]
    assert "workloads.api.registry" in names
    code = (
        "import sys; before = set(sys.modules); from importlib import import_module\n"
        f"for name in {names!r}: import_module(name)\n"
        "loaded = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "print(sorted(loaded - sys.stdlib_module_names - {'__mp_main__'}))"  # what multiprocessing calls __main__
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment(), check=True)
    assert result.stdout.strip() == "['workloads']"
