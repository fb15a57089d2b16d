"""Hydra words its errors as `sweeper/cli/explanation.py` expects: a canary for each message, for a newer Hydra."""

import re
from importlib.metadata import version
from pathlib import Path
from unittest.mock import Mock

import pytest
from hydra._internal.hydra import Hydra

from sweeper.cli.arguments import parse_arguments
from sweeper.cli.composition import compose_sweeps
from sweeper.cli.explanation import MESSAGES, SEVERAL_VALUES, UNKNOWN_KEY
from workloads.api.errors import UserInputError

RULES = MESSAGES["hydra"]
# Command lines, with the message of Hydra that each provokes and how it is shown.
PROVOKED = {
    "-m hydra.verbose=true,false": (RULES[0][0], ": a Hydra key takes one value"),
    "+budget.trials=5": (RULES[1][0], "+budget.trials: the key exists; set it without the +"),
    "~seed=5": (RULES[2][0], "~seed=5: is not deleted, because its value is 0"),
    "~workload=probe": (RULES[3][0], "~workload=probe: is not chosen, so it cannot be deleted"),
    "-cd nowhere": (RULES[4][0], "nowhere: no such folder"),
    "++workload=probe": (RULES[5][0], "++workload=probe: choose a group without ++"),
    "-cd mine workload=wrong": (RULES[6][0], "a key in a YAML file has type NoneType, and must be text"),
    "budget=[1]": (RULES[7][0], "budget=[1]: must be a mapping"),
    "-cd mine workload=header": (RULES[8][0], "@package a global"),
    "+workload=probe": (RULES[9][0], "workload: is chosen twice"),
    "seed=1,2": (SEVERAL_VALUES.pattern, "several values; add -m"),
    "bugdet.trials=5": (UNKNOWN_KEY.pattern, "bugdet.trials: unknown key"),
}


@pytest.mark.parametrize("line", PROVOKED)
def test_hydra_words_its_errors_as_they_are_matched(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine/workload").mkdir(parents=True)
    (tmp_path / "mine/workload/wrong.yaml").write_text("# @package _global_\nworkload: {null: 1}\n")
    (tmp_path / "mine/workload/header.yaml").write_text("# @package a global\nseed: 1\n")
    pattern, shown = PROVOKED[line]
    with pytest.raises(UserInputError) as raised:
        compose_sweeps(parse_arguments(line.split()))
    error = raised.value.__cause__
    message = f"{error}\n{(error and error.__cause__) or ''}"
    assert re.search(pattern, message) and shown in str(raised.value), (
        f"Hydra {version('hydra-core')} words this error otherwise:\n{message}\nPut its words into"
        " sweeper/cli/messages.toml, then raise the version of hydra-core in pyproject.toml. Until then the user gets"
        f" Hydra's first line: {raised.value}"
    )


def test_every_rule_has_its_canary() -> None:
    assert {pattern for pattern, _ in PROVOKED.values()} == {
        *(pattern for pattern, _ in RULES),
        SEVERAL_VALUES.pattern,
        UNKNOWN_KEY.pattern,
    }


def test_hydras_own_help_beside_a_file_that_cannot_be_read_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine/workload").mkdir(parents=True)
    (tmp_path / "mine/workload/wrong.yaml").write_text("seed: \x7f1\n")
    with pytest.raises(UserInputError, match=r"wrong.yaml: special characters are not allowed"):
        compose_sweeps(parse_arguments(["--hydra-help", "-cd", "mine", "workload=wrong"]))


def test_a_configuration_is_composed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default Hydra composes it a second time, to read its mode."""
    compose = Mock(wraps=Hydra.compose_config)
    monkeypatch.setattr(Hydra, "compose_config", lambda *arguments, **keywords: compose(*arguments, **keywords))
    assert len(compose_sweeps(parse_arguments(["workload=probe"]))) == compose.call_count == 1
