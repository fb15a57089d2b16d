"""The journal of a sweep: Optuna's format, one writer, and nothing of it lost when the process ends."""

import subprocess
import sys
from pathlib import Path

import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState, create_trial

from sweeper.search.journal import Journal, JournalFile
from tests.conftest import environment

DISTRIBUTIONS = {"x": optuna.distributions.FloatDistribution(0, 1)}


def running_trial(x: float) -> optuna.trial.FrozenTrial:
    return create_trial(state=TrialState.RUNNING, params={"x": x}, distributions=DISTRIBUTIONS)


def test_an_opened_journal_holds_the_trials_that_were_written(tmp_path: Path) -> None:
    path = tmp_path / "study.journal"
    journal = Journal(path, "minimize")
    journal.add_trial(running_trial(0.25))
    journal.set_attr(0, "record", "{}")
    journal.tell(0, 3.0, TrialState.COMPLETE)
    with path.open("a") as file:
        file.write('{"op_code": 4, "wor')  # an incomplete line, as after a kill
    reopened = Journal(path, "maximize")
    (trial,) = reopened.trials
    assert (trial.value, trial.params, trial.user_attrs) == (3.0, {"x": 0.25}, {"record": "{}"})
    assert reopened.study.direction is optuna.study.StudyDirection.MINIMIZE
    assert path.read_bytes().endswith(b"\n")
    reopened.add_trial(running_trial(0.5))
    reopened.sync()
    reopened.add_trial(running_trial(0.75))
    path.rename(tmp_path / "elsewhere")  # a next start would begin from nothing
    with pytest.raises(FileNotFoundError, match="moved or deleted while the sweep ran"):
        reopened.sync()


def test_a_journal_cut_at_any_byte_keeps_every_trial_whose_end_is_whole(tmp_path: Path) -> None:
    """And it takes further entries: each is on a line of its own."""
    path, cut, ends = tmp_path / "study.journal", tmp_path / "cut.journal", []
    journal = Journal(path, "minimize")
    for number in range(2):
        journal.add_trial(running_trial(0.25))
        journal.set_attr(number, "record", {})
        journal.tell(number, 3.0, TrialState.COMPLETE)
        ends.append(path.stat().st_size - 1)  # without the line break
    content = path.read_bytes()
    for size in range(len(content) + 1):
        cut.write_bytes(content[:size])
        file = JournalFile(cut)
        assert list(file.ended) == [number for number, end in enumerate(ends) if size >= end], size
        file.append_logs([{"op_code": 8, "trial_id": 0, "user_attr": {}}])
        assert all(line.endswith(b"}\n") for line in cut.read_bytes().splitlines(keepends=True))


def test_attributes_of_running_trials_are_set_by_number(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "study.journal", "maximize")
    for x in (0.1, 0.2):
        journal.add_trial(running_trial(x))
    journal.set_attr(1, "steps", {"1": 0.5})
    assert [trial.user_attrs for trial in journal.trials] == [{}, {"steps": {"1": 0.5}}]


def test_optuna_reads_the_file_as_its_own(tmp_path: Path) -> None:
    """As `optuna-dashboard FILE` does."""
    path = tmp_path / "study.journal"
    journal = Journal(path, "maximize", metrics=["tflops"])
    for number in range(3):
        journal.add_trial(running_trial(number / 10))
        journal.tell(number, float(number), TrialState.COMPLETE)
    (study,) = optuna.get_all_study_summaries(JournalStorage(JournalFileBackend(str(path))))
    loaded = optuna.load_study(study_name=study.study_name, storage=JournalStorage(JournalFileBackend(str(path))))
    assert [trial.value for trial in loaded.trials] == [0.0, 1.0, 2.0]
    assert (loaded.study_name, loaded.metric_names) == (tmp_path.name, ["tflops"])  # which it shows


def test_a_journal_is_read_as_optuna_reads_it(tmp_path: Path) -> None:
    """If this fails with a new Optuna, its journal has changed: compare its `JournalOperation` with `fold`."""
    path = tmp_path / "study.journal"
    journal = Journal(path, "maximize")
    distributions = {**DISTRIBUTIONS, "dtype": optuna.distributions.CategoricalDistribution(["bf16", "fp8"])}
    for number in range(6):
        params = {"x": number / 10, "dtype": ["bf16", "fp8"][number % 2]}
        attrs = {"retry": {"trial": 0}} if number == 2 else {}
        state = TrialState.RUNNING
        journal.add_trial(create_trial(state=state, params=params, distributions=distributions, user_attrs=attrs))
        journal.set_attr(number, "steps", {1: 0.5})
    for number, state in enumerate((TrialState.COMPLETE, TrialState.FAIL, TrialState.PRUNED)):
        journal.set_attr(number, "record", {"number": number, "metrics": {"rate": float("inf")}})
        journal.tell(number, 2.5 if state is TrialState.COMPLETE else None, state)
    journal.set_attr(3, "record", {"number": 3})  # the driver is killed before the state
    with path.open("a") as file:  # what another process writes of a trial that has ended counts for nobody
        file.write('{"op_code":8,"worker_id":"another","trial_id":0,"user_attr":{"steps":{}}}\n')
        file.write('{"op_code":6,"worker_id":"another","trial_id":0,"state":3,"values":null}\n')
    expected = optuna.load_study(study_name=tmp_path.name, storage=JournalStorage(JournalFileBackend(str(path)))).trials
    names = ("number", "state", "params", "value", "user_attrs")
    trials = Journal(path, "maximize").trials
    assert [[getattr(trial, name) for name in names] for trial in trials] == [
        [getattr(trial, name) for name in names] for trial in expected
    ]
    assert [trial.state.name for trial in trials] == ["COMPLETE", "FAIL", "PRUNED", "RUNNING", "RUNNING", "RUNNING"]


def test_optuna_gets_neither_the_parameters_nor_the_records_of_ended_trials(tmp_path: Path) -> None:
    """Its replay of them took much of the time and the memory of opening a study of 100,000 trials."""
    path = tmp_path / "study.journal"
    for _ in range(2):
        journal = Journal(path, "maximize")
        number = len(journal.trials)
        journal.add_trial(running_trial(0.5))
        journal.set_attr(number, "record", {"number": number})
        journal.tell(number, 1.0, TrialState.COMPLETE)
    first, second = journal.study.get_trials(deepcopy=False)
    assert (first.params, first.user_attrs, first.value) == ({}, {}, 1.0)
    assert second.user_attrs == {"record": None}
    assert journal.trials[0].params == {"x": 0.5} and journal.trials[0].user_attrs == {"record": {"number": 0}}


def test_lines_survive_the_end_of_the_process_without_a_sync(tmp_path: Path) -> None:
    path = tmp_path / "study.journal"
    code = f"""
import os, signal
from pathlib import Path
from tests.sweeper.search.test_journal import Journal, running_trial
journal = Journal(Path({str(path)!r}), "maximize")
journal.add_trial(running_trial(0.5))
os.kill(os.getpid(), signal.SIGKILL)
"""
    killed = subprocess.run([sys.executable, "-c", code], env=environment(), timeout=60)
    assert killed.returncode < 0 and [trial.params for trial in Journal(path, "maximize").trials] == [{"x": 0.5}]
