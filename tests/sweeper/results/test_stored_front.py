"""The front of a sweep on disk, from its real journal: in the list, in what `best` prints, and in Python."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from sweeper.commands.best.main import COMMAND, write_trial
from sweeper.commands.list.main import describe_row
from sweeper.common.trials import Remeasurement, TrialRecord
from sweeper.config.space import Range, Space
from sweeper.metrics.criteria import Criteria
from sweeper.notebook.result import read_result
from sweeper.results.description import FILE
from sweeper.results.stored import StoredSweep, find_sweep
from tests.support.factories import sweep_description, trial_record
from tests.support.studies import ask_trial, open_study

TWO = Criteria.of({"tokens_per_s": "maximize", "peak_device_gib": "minimize"})
SEARCHED = [(100.0, 10.0), (90.0, 9.0), (80.0, 8.0), (70.0, 9.5)]  # the last one is dominated
ROUNDS = {0: (100.0, 10.0), 1: (79.0, 9.0), 2: (81.0, 8.0)}  # of the finals, in which trial 2 is better than trial 1


def measured(number: int, values: tuple[float, float], remeasurement: Remeasurement | None = None) -> TrialRecord:
    metrics = dict(zip(TWO.metrics, values, strict=True))
    return trial_record(number, {"m": number}, metrics=metrics, remeasurement=remeasurement)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A results directory with a sweep of two objectives whose finals are over, and whose driver was killed then."""
    path = tmp_path_factory.mktemp("results")
    folder = path / "sweeps" / "front"
    folder.mkdir(parents=True)
    (folder / "lock").touch()
    study = open_study(folder, Space({"m": Range(0, 1000, 1)}), criteria=TWO)
    for values in SEARCHED:
        study.tell(measured(ask_trial(study).number, values))
    for number, (speed, gib) in ROUNDS.items():
        for place in range(3):
            mark = Remeasurement(number, place, tuple(ROUNDS))
            trial = study.ask_remeasurement({"m": number}, mark)
            study.tell(measured(trial.number, (speed + 0.1 * place, gib), mark))
    section = {"name": "probe", "objective": "tokens_per_s", "direction": "maximize"}
    description = sweep_description(["python", "-m", "sweeper"], name="front")
    config = {**description.config, "workload": section, "objective": list(TWO.metrics)}
    (folder / FILE).write_text(json.dumps({**asdict(description), "config": config}))
    return path


def test_the_list_has_the_size_of_the_front(directory: Path) -> None:
    assert describe_row(find_sweep(directory))[2] == "front of 2 trials"


def test_best_lists_the_front_and_a_trial_of_it_can_be_chosen(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert COMMAND.run([f"dir={directory}"]) == 0
    out = capsys.readouterr().out
    assert "front of 2 trials" in out and "trial=0" in out
    rows = [line.split() for line in out.splitlines() if line.split()[:1] in (["0"], ["1"], ["2"])]
    assert [row[0] for row in rows] == ["0", "2", "1"] and "dominated" in rows[2]
    files = write_trial(find_sweep(directory), 2)
    assert "81.1 tokens/s (95%" in files.title and "mean of 3 rounds of the finals), 8 GiB on" in files.title
    assert files.result["other_objectives"] == {"peak_device_gib": pytest.approx(8.0)}


def test_a_result_in_python_has_the_front_as_a_table(directory: Path) -> None:
    result = read_result(directory / "sweeps" / "front")
    assert result.front is not None and list(result.front.index) == [0, 2, 1]
    assert list(result.front["on_front"]) == [True, True, False]
    assert list(result.front["share"].round(3)) == [1.0, 1.0, 0.0]
    assert result.front.loc[2, "tokens_per_s"] == pytest.approx(81.1)
    assert result.front.loc[2, "tokens_per_s_ci_low"] < 81.1 < result.front.loc[2, "tokens_per_s_ci_high"]
    assert result.front.attrs["units"]["peak_device_gib"] == "GiB" and result.front.loc[2, "param.m"] == 2
    assert result.best is not None and (result.best.trial, result.best.rounds) == (0, 3)


def test_a_sweep_with_one_objective_has_no_front(directory: Path, tmp_path: Path) -> None:
    folder = tmp_path / "sweeps" / "one"
    folder.mkdir(parents=True)
    fields = asdict(sweep_description(["sweeper"], name="one"))
    (folder / FILE).write_text(json.dumps(fields))
    assert StoredSweep(folder).front is None and read_result(folder).front is None
