"""Functions packed for other processes, and spaces written as overrides."""

import importlib
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hydra.core.global_hydra import GlobalHydra

from sweeper.cli.arguments import parse_arguments
from sweeper.cli.composition import compose_sweeps
from sweeper.commands.function.main import read_function
from sweeper.config import space as spaces
from sweeper.config.space import Choice, Interval, Range
from sweeper.notebook.packing import space_words, write_function
from tests.conftest import environment
from workloads.api.errors import UserInputError

CALL = (
    "import json, sys; from workloads.api.trial import run_trial; from workloads.api.contract import Rank; "
    "settings = json.load(open(sys.argv[1])); "
    "print(run_trial('function', json.loads(sys.argv[2]), Rank(), settings).metrics['value'])"
)


def test_a_function_of_a_module_that_workers_do_not_find_is_packed_by_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_tool_of_this_test.py").write_text("SCALE = 3\ndef helper(x): return SCALE * x\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module("my_tool_of_this_test")
    file = write_function(lambda x, offset=1: module.helper(x) + offset, {"x": [1]}, tmp_path)
    named = write_function(module.helper, {"x": [1]}, tmp_path)
    (tmp_path / "my_tool_of_this_test.py").unlink()
    for path, expected in ((named, "6.0"),):
        called = subprocess.run(
            [sys.executable, "-c", CALL, path, '{"x": 2}'], env=environment(), capture_output=True, text=True
        )
        assert called.stdout.strip() == expected, called.stderr
    assert json.loads(file.read_text())["defaults"] == {"offset": 1}
    del sys.modules["my_tool_of_this_test"]


def test_a_closure_is_packed_with_its_values_which_its_digest_has(tmp_path: Path) -> None:
    def make(factor: float) -> Any:
        return lambda x, rank, data=(): factor * x

    first, second, again = (write_function(make(factor), {"x": [1]}, tmp_path) for factor in (2, 3, 2))
    assert first == again != second and first.name.startswith("lambda-")
    settings = json.loads(first.read_text())
    assert settings["parameters"] == ["x"] and settings["takes_rank"] and (first.stat().st_mode & 0o77) == 0
    assert read_function(first).benchmark_version.endswith(settings["digest"])


def test_a_function_that_cannot_be_packed_is_refused(tmp_path: Path) -> None:
    lock = threading.Lock()
    with pytest.raises(UserInputError, match=r"workload=lambda: cannot be sent to workers: .*lock"):
        write_function(lambda x: lock.locked(), {}, tmp_path)
    (tmp_path / "other.json").write_text("[1]")
    with pytest.raises(UserInputError, match=r"other\.json: not a function that sweeper\.run has packed"):
        read_function(tmp_path / "other.json")


def test_a_space_of_python_values_is_the_space_that_they_describe(monkeypatch: pytest.MonkeyPatch) -> None:
    space = {"x": [1, 2], "m": range(64, 257, 64), "lr": "interval(0.1, 1)", "kind": ["a", "b c", "it's"], "on": True}
    texts = ["null", "True", "nan", "-inf", "1e5", "", " a", 'q"q', "it\\'s", "a\\", "${dir}", "\\${dir}", "a,[b]"]
    texts += ["x=1", "é\t"]
    space |= {"text": texts, "constant": "false", "or": "choice(1,null)", "reference": "${dir}"}
    space |= {"n": np.int64(4), "some": (True, None), "env": {"NCCL_ALGO": ["Ring", "Tree"]}, "name": "abc"}
    monkeypatch.setattr(sys, "argv", ["sweeper"])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    GlobalHydra.instance().clear()
    (sweep,) = compose_sweeps(parse_arguments(["workload=probe", *space_words(space)]))
    read = spaces.parse(sweep.config.space, "cpu")
    assert read.dimensions["x"] == Choice((1, 2)) and read.dimensions["m"] == Range(64, 256, 64)
    assert read.dimensions["lr"] == Interval(0.1, 1.0) and read.dimensions["kind"] == Choice(("a", "b c", "it's"))
    assert read.dimensions["some"] == Choice((True, None)) and read.dimensions["env.NCCL_ALGO"] == Choice(
        ("Ring", "Tree")
    )
    assert read.dimensions["or"] == spaces.parse_entry("or", "choice(1,null)") == Choice((1, None))
    assert read.dimensions["text"] == Choice(tuple(texts))
    assert {"constant": "false", "reference": "${dir}"}.items() <= read.constants.items()
    assert {"on": True, "n": 4, "name": "abc"}.items() <= read.constants.items()
    with pytest.raises(UserInputError, match=r"space\.x='a\\nb': a text must be one line"):
        space_words({"x": ["a\nb"]})
    with pytest.raises(UserInputError, match=r"space\.x=\{1\}: must be a number, a text"):
        space_words({"x": {1}})
