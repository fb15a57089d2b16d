"""The command that runs one trial again."""

import sys
from typing import Any

import pytest
from hydra.core.global_hydra import GlobalHydra

from sweeper.cli.arguments import parse_arguments
from sweeper.cli.composition import compose_sweeps
from sweeper.commands.best.files import command_words
from sweeper.config import space as spaces
from sweeper.config.resolution import ResolvedConfig
from tests.support.factories import sweep_description, trial_record

TEXTS = ["a,b", "choice(1,2)", "it's", 'a "b" c', "a\\", "true", "${HOME}", "null", "10", "[1]", "", " b", "a=b", "é"]
TEXTS += ["\\${x}", "a,\\${x}", ".5", ".1e3", "naïve"]


@pytest.fixture(autouse=True)
def argv(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["sweeper"])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")


def resolve(words: list[str]) -> ResolvedConfig:
    GlobalHydra.instance().clear()
    (sweep,) = compose_sweeps(parse_arguments(words))
    return sweep.resolve()


def constants(resolved: ResolvedConfig) -> dict[str, Any]:
    return spaces.parse(resolved.config.space, "cpu").constants


def test_values_are_read_back_as_they_were() -> None:
    values = [*TEXTS, 3, 0.1, 1e-30, 2.5e20, True, None]
    params = {f"p{n}": value for n, value in enumerate(values)} | {f"env.V{n}": value for n, value in enumerate(TEXTS)}
    description = sweep_description(["python", "-m", "sweeper", "workload=probe"])
    read = constants(resolve(command_words(description, trial_record(params=params))[3:]))
    different = {
        name: read[name] for name, value in params.items() if (read[name], type(read[name])) != (value, type(value))
    }
    assert not different


def test_the_command_keeps_what_was_typed_and_fixes_the_space() -> None:
    typed = ["--config-dir", "my", "workload=tuner", "trial.timeout_s=9", "~space.y", "space.x=1,2", "budget.trials=9"]
    typed += ["search=gp", "search.pruner=median", "finals.top=9", "name=a", "retry=all", "gpus=all", "hardware=auto"]
    words = command_words(sweep_description(["sweeper", *typed]), trial_record(params={"x": 2}))
    kept = ["sweeper", "--config-dir=my", "workload=tuner", "trial.timeout_s=9"]
    assert words == [*kept, "hardware=cpu", "gpus=1", "space.seed=0", "space.x=2", "search=grid", "finals.top=0"]


def test_a_sweep_on_some_cores_is_run_again_on_as_many() -> None:
    description = sweep_description(["sweeper", "cluster.cpus=4", "cluster.max_concurrent_trials=1"], cpus=1)
    words = command_words(description, trial_record(params={"x": 2}))
    assert [word for word in words if "cluster" in word] == ["cluster.max_concurrent_trials=1", "cluster.cpus=1"]


@pytest.mark.parametrize(
    "program", [["python", "-m", "sweeper", "function"], ["sweeper", "function"], ["python", "-m", "sweeper.function"]]
)
def test_the_command_of_a_packed_function_keeps_its_file(program: list[str]) -> None:
    """The last form is that of 0.2."""
    words = command_words(sweep_description([*program, "f.json", "name=a"]), trial_record(params={"x": 2}))
    start = words[: words.index("f.json") + 1]
    assert start[-2:] == ["function", "f.json"] and start[:-2] in (["python", "-m", "sweeper"], ["sweeper"])
    assert "space.x=2" in words and "name=a" not in words
