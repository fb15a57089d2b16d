"""A test that leaves state of the process behind fails, and the message names what it left."""

import importlib
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.support.process_state import unchanged_process


def import_from(folder: Path) -> None:
    (folder / "stand_in_module.py").touch()
    sys.path.append(str(folder))
    importlib.invalidate_caches()
    importlib.import_module("stand_in_module")
    sys.path.remove(str(folder))


@pytest.mark.parametrize(
    ("leave", "name"),
    [
        (import_from, "sys.modules['stand_in_module']"),
        (lambda _: sys.modules.update(stand_in_module=ModuleType("stand_in_module")), "sys.modules['stand_in_module']"),
        (lambda _: sys.modules.update(json=ModuleType("json")), "sys.modules['json']"),
        (lambda _: sys.modules.update({"json.tool": None}), "sys.modules['json.tool']"),
        (lambda _: os.environ.update(OF_THIS_TEST="1"), "os.environ['OF_THIS_TEST']"),
        (lambda folder: sys.path.append(str(folder)), "sys.path entry"),
        (os.chdir, "the working directory"),
        (lambda _: logging.getLogger().addHandler(logging.NullHandler()), "handlers of the root logger"),
        (lambda _: torch.set_default_dtype(torch.float64), "settings of torch"),
    ],
    ids=["import", "module", "replaced", "none", "variable", "path", "directory", "logging", "torch"],
)
def test_what_a_test_leaves_behind_is_named(
    leave: Callable[[Path], object], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.setattr(logging.getLogger(), "handlers", [*logging.getLogger().handlers])
    monkeypatch.chdir(Path.cwd())
    for module in ("json", "json.tool", "stand_in_module"):
        monkeypatch.setitem(sys.modules, module, sys.modules.get(module))
    for module in ("json.tool", "stand_in_module"):
        del sys.modules[module]
    try:
        with pytest.raises(pytest.fail.Exception) as failure, unchanged_process("this test"):
            leave(tmp_path)
    finally:
        torch.set_default_dtype(torch.float32)
    assert str(failure.value).startswith(f"this test leaves behind: {name}")


def test_what_a_library_imports_and_what_is_restored_is_no_leftover(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wave", None)
    monkeypatch.setitem(sys.modules, "__triton_launcher", ModuleType("__triton_launcher"))
    del sys.modules["wave"]
    with unchanged_process("this test"):
        importlib.import_module("wave")
        sys.modules["__triton_launcher"] = ModuleType("__triton_launcher")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("OF_THIS_TEST", "1")
            patch.setitem(sys.modules, "stand_in_module", ModuleType("stand_in_module"))
