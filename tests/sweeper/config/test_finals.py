"""How many trials the finals measure again by default: with one objective the workload decides."""

from pathlib import Path

import pytest

from sweeper.cli.arguments import parse_arguments
from sweeper.cli.composition import compose_sweeps
from sweeper.config.resolution import CONF
from sweeper.config.schema import Finals

SEVERAL = "objective=[tflops,step_time_ms]"
ONE = {"matmul": Finals(3, 5), "parallel": Finals(3, 3), "llama8b": Finals(0, 3), "precision": Finals(0, 5)}
# The others need keys of their own, such as a program to run, or are run from Python.
WORKLOADS = [p.stem for p in (CONF / "workload").glob("*.yaml") if "???" not in p.read_text() and p.stem != "function"]


def finals_of(*words: str) -> Finals:
    (sweep,) = compose_sweeps(parse_arguments(words))
    return sweep.resolve().config.finals


@pytest.mark.parametrize("workload", ONE)
def test_with_one_objective_the_workload_decides(workload: str) -> None:
    assert finals_of(f"workload={workload}") == ONE[workload]
    assert finals_of(f"workload={workload}", "finals.rounds=4") == Finals(ONE[workload].top, 4)


@pytest.mark.parametrize("workload", sorted(set(WORKLOADS) - {"command"}))
def test_every_workload_measures_its_front_again(workload: str) -> None:
    words = (f"workload={workload}", SEVERAL, f"gpus={2 if workload == 'collectives' else 1}")
    assert finals_of(*words).top == 3


@pytest.mark.parametrize("top", [0, 20])
def test_the_number_of_finalists_may_be_set(top: int) -> None:
    assert finals_of("workload=probe", SEVERAL, f"finals.top={top}").top == top


def test_a_command_of_a_users_own_file_has_those_of_a_command(tmp_path: Path) -> None:
    (tmp_path / "workload").mkdir()
    text = "# @package _global_\nworkload: {name: command, objective: tokens_per_s}\ncommand: {run: ls}\nspace: {}\n"
    (tmp_path / "workload" / "mine.yaml").write_text(text)
    words = (f"--config-dir={tmp_path}", "workload=mine")
    assert finals_of(*words) == Finals(0, 3)
    assert finals_of(*words, "objective=[tokens_per_s,step_time_ms]") == Finals(3, 3)
    (tmp_path / "workload" / "mine.yaml").write_text(f"{text}finals: {{top: 0}}\n")
    assert finals_of(*words, "objective=[tokens_per_s,step_time_ms]") == Finals(0, 3)
