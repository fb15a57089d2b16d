"""What is wrong in a user's YAML gets a line with the file, the number of the line and the key."""

from collections.abc import Callable
from pathlib import Path

import pytest

from sweeper.cli.sources import ConfigFile
from tests.conftest import CommandResult

PROBE = "# @package _global_\nworkload: {name: probe, objective: score}\n"
# The text of the file, the line of the error, and a part of its message.
WRONG = {
    "an unclosed bracket": (PROBE + "space: {x: 1\nbudget: 5\n", 4, "expected ',' or '}'"),
    "an unclosed quote": (PROBE + "space: {x: 'a}\n", 4, "quoted scalar that starts in line 3"),
    "a missing colon": (PROBE + "space\n  x: 1\n", 4, "could not find expected ':'"),
    "a tab": (PROBE + "space:\n\tx: 1\n", 4, "a tab; indent with spaces"),
    "a key twice": (PROBE + "space:\n  x: 1\n  x: 2\n", 5, "duplicate key x"),
    "two documents": (PROBE + "---\nspace: {x: 1}\n", 3, "second document"),
    "not UTF-8": (PROBE + "space: {x: '\udce9'}\n", 3, "byte 0xe9 is not UTF-8"),
    "an unclosed reference": (PROBE + "space: {x: '${foo'}\n", 3, "${foo: cannot be parsed"),
    "no first line": ("workload: {name: probe, objective: score}\n", 1, "first line must be `# @package _global_`"),
    "another package": (
        "# @package _global_: x\nspace: {}\n",
        1,
        "the first line of a file must be # @package _global_",
    ),
    "a byte-order mark": ("\ufeff" + PROBE + "space: {x: 1}\n", 1, "byte-order mark"),
    "a list": ("# @package _global_\n- x\n", 1, "must be a mapping"),
    "nothing": ("# @package _global_\n", 1, "has no keys"),
    "no workload's name": ("# @package _global_\nworkload: {objective: score}\n", 2, "workload.name: required"),
    "an unknown workload": (PROBE.replace("probe", "prob") + "space: {}\n", 2, "Did you mean probe?"),
    "an unknown key": (PROBE + "space: {x: 1}\nbudget:\n  trails: 5\n", 5, "Did you mean budget.trials?"),
    "an unknown section": (PROBE + "spce: {x: 1}\n", 3, "spce: unknown key"),
    "a wrong type": (PROBE + "space: {x: 1}\nbudget:\n  trials: ten\n", 5, "budget.trials=ten: must be an integer"),
    "a number for a section": (PROBE + "space: 5\n", 3, "space=5: must be a mapping"),
    "an unknown reference": (PROBE + "space: {x: '${foo}'}\n", 3, "space.x: Interpolation key 'foo' not found"),
    "an unknown parameter": (PROBE + "space:\n  q: 1\n", 4, "space.q: unknown parameter"),
    "a number for a parameter": (PROBE + "space:\n  1: 1\n", 4, "space.1: unknown parameter"),
    "no space": (PROBE, None, "space: required (a mapping)"),
    "an empty range": (PROBE + "space:\n  x: 1\n  y: range(5, 1)\n", 5, "empty range"),
    "a range without quotes": (PROBE + "space: {x: interval(0, 1)}\n", 3, "within {} in a file it needs quotes"),
    "an unset value": (PROBE + "space:\n  x: ???\n", 4, "space.x: required"),
}


# Each of these takes another way through the program. The others are in soak: a composition takes a third of a second.
FAST = {"an unclosed bracket", "a tab", "a key twice", "not UTF-8", "an unclosed reference", "no first line", "a list"}
FAST |= {"an unknown workload", "an unknown key", "a wrong type", "an unknown parameter", "an unset value"}


def write_workload(folder: Path, text: str) -> None:
    """Write the file of `workload=mine`, with `--config-dir conf`."""
    path = folder / "conf/workload/mine.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(text, encoding="utf-8", errors="surrogateescape")


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.soak) for name in WRONG]
)
def test_an_error_in_a_file_is_one_line_with_its_place(
    name: str, tmp_path: Path, run_cli: Callable[..., CommandResult]
) -> None:
    text, line, reason = WRONG[name]
    write_workload(tmp_path, text)
    result = run_cli("--config-dir", "conf", "workload=mine", "hardware=cpu", "plan=true")
    assert result.code == 2 and result.out == ""
    place = "" if line is None else f":{line}"
    assert result.err.startswith(f"sweeper: conf/workload/mine.yaml{place}: "), result.err
    assert reason in result.err and len(result.err.splitlines()) == 1, result.err


def test_a_typed_key_has_no_place_in_a_file(tmp_path: Path, run_cli: Callable[..., CommandResult]) -> None:
    write_workload(tmp_path, PROBE + "space: {x: 1}\nbudget: {trials: 5}\n")
    result = run_cli("--config-dir", "conf", "workload=mine", "budget.trials=ten")
    assert result.err == "sweeper: budget.trials=ten: must be an integer or null\n"


def test_a_file_has_the_lines_and_comments_of_its_keys(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(
        "a: 1    # one\n"
        "b:      # two\n"
        "  c: 'x # y'   # three\n"
        "               # and more\n"
        "  d: [1, 2]\n"
        "# of nothing\n"
        "e: {f: 1}  # five\n"
    )
    file = ConfigFile(path, package="p")
    assert file.comments() == {"p.a": "one", "p.b": "two", "p.b.c": "three and more", "p.e": "five"}
    assert [file.line_of(key) for key in ("p.a", "p.b.d", "p.e.f", "a")] == [1, 5, 7, None]
