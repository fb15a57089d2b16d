"""A sweep of a busy machine: the cores that it leaves to other processes, and its rounds again."""

import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sweeper.cli.arguments import parse_arguments
from sweeper.cli.composition import compose_sweeps
from sweeper.commands.sweep import free_cores
from sweeper.commands.sweep.rounds import choose_again
from sweeper.common.trials import Retry, TrialRecord
from sweeper.config.hardware import Node
from sweeper.preflight.sweep_plan import SweepPlan, plan_sweep
from tests.support.factories import trial_record
from workloads.api import cores
from workloads.api.errors import UserInputError

LAPTOP = Node("this machine", cpus=4, cpu_name="Laptop")


class Use(cores.CoreWatch):
    def __init__(self, cores: float) -> None:
        self.cores = cores

    def find_use(self) -> tuple[float, str]:
        return self.cores, "python3 (pid 123)" if self.cores else ""


def plan(folder: Path, *arguments: str, use: float = 0.0, cpus: int | None = None) -> SweepPlan:
    (sweep,) = compose_sweeps(parse_arguments([f"dir={folder}", *arguments]))
    resolved = sweep.resolve()
    return free_cores.plan_on_free_cores(lambda nodes: plan_sweep(resolved, nodes), [LAPTOP], cpus, Use(use))


@pytest.fixture(autouse=True)
def no_chosen_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


def test_a_sweep_leaves_the_cores_that_others_hold_and_is_not_the_sweep_of_an_idle_machine(tmp_path: Path) -> None:
    idle, busy = plan(tmp_path), plan(tmp_path, use=1.1)
    assert (idle.target.model, idle.target.devices, idle.busy) == ("Laptop (4 cores)", 4, "")
    assert (busy.target.model, busy.target.devices) == ("Laptop (3 of 4 cores)", 3)
    assert busy.busy == (
        "other processes use 1.1 of 4 cores, most of it python3 (pid 123): trials use 3 (cluster.cpus=4: all)"
    )
    assert idle.identity != busy.identity and idle.name != busy.name
    full = plan(tmp_path, use=3.7)
    assert full.target.model == idle.target.model and "end them first" in full.busy
    assert plan(tmp_path, use=1.1, cpus=4).name == idle.name and plan(tmp_path, cpus=3).name == busy.name
    with pytest.raises(UserInputError, match=r"cluster.cpus=5: this machine has 4 cores"):
        plan(tmp_path, cpus=5)


def test_who_chooses_threads_or_processes_has_chosen_the_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    several = "cluster.max_concurrent_trials=2"
    for arguments in [[several], ["space.env.OMP_NUM_THREADS=2"], ["workload=parallel", "gpus=4"]]:
        assert not plan(tmp_path, *arguments, use=1.0).busy
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert not plan(tmp_path, use=1.0).busy


@pytest.mark.parametrize("name", [[], ["name=mine"]])
def test_a_resumed_sweep_keeps_its_cores(tmp_path: Path, name: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    begun = defaultdict[Path, Any](lambda: SimpleNamespace(device=""))
    monkeypatch.setattr("sweeper.results.description.read_description", begun.__getitem__)
    first = plan(tmp_path, *name, use=2.0)
    begun[first.folder] = SimpleNamespace(device=first.target.model, config={"cluster": {}})
    for resumed in (plan(tmp_path, *name), plan(tmp_path, *name, "plan=true", use=1.0)):
        assert (resumed.name, resumed.identity) == (first.name, first.identity)
        assert resumed.busy == "trials use 2 of 4 cores, as when this sweep began (cluster.cpus=4: all)"
    begun[first.folder].config = {"cluster": {"cpus": 2}}  # which another command chose
    assert bool(plan(tmp_path, *name).busy) == bool(name)


def test_the_steady_use_of_another_process_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "WINDOW_S", 0.15)
    burner = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        name = f"{Path(f'/proc/{burner.pid}/comm').read_text().strip()} (pid {burner.pid})"
        while cores._read()[2].get(name, 0.0) < 0.1:
            os.sched_yield()
        used, process = cores.CoreWatch().find_use()
    finally:
        burner.kill()
        burner.wait()
    assert used >= cores.HELD and process.endswith(")")


def test_rounds_again_end_when_they_do_not_help_and_take_at_most_the_time_of_the_search() -> None:
    def choose(disturbed: int, trials: int = 20, rounds: Sequence[int] = (), gangs: int = 1) -> int:
        """Return how many the next round measures, after rounds of these numbers of trials, of 10 s each."""
        records, again = [trial_record(n, started_at_s=0.0, ended_at_s=10.0) for n in range(trials)], set[int]()
        for size in rounds:
            of_round = records[-size:]
            again |= {record.number for record in of_round}
            first = len(records)
            records += [replace(r, number=first + n, retry=Retry(r.number)) for n, r in enumerate(of_round)]
        chosen = choose_again(records[-disturbed:], {r.number: r for r in records}, again, gangs)
        assert chosen == records[-disturbed:][: len(chosen)]
        return len(chosen)

    assert choose(9) == 9 and choose(8, rounds=[9]) == 8
    assert choose(6, 40, rounds=[8, 8]) == 6 and choose(7, 40, rounds=[8, 8]) == 0  # the second round helped too little
    assert choose(1, rounds=[2, 2, 2]) == 0
    assert choose(9, rounds=[15]) == 5 and choose(9, rounds=[15], gangs=2) == 5  # as long as the search
    assert choose(6, trials=6) == 6 and choose(5, trials=3, rounds=[3]) == 3  # a minute after a short search
    assert choose(5, trials=3, rounds=[3], gangs=2) == 5


def test_trials_of_an_extended_sweep_have_rounds_of_their_own() -> None:
    def record(number: int, retried: int | None = None) -> TrialRecord:
        trial = trial_record(number, started_at_s=0.0, ended_at_s=10.0)
        return trial if retried is None else replace(trial, retry=Retry(retried))

    searched = [*map(record, range(20)), record(20, 19), record(21, 20), record(22, 21)]  # trial 19 in three rounds
    new = [record(number) for number in range(23, 33)]
    records = {trial.number: trial for trial in [*searched, *new]}
    assert choose_again([searched[-1], *new[:4]], records, {19, 20, 21}, 1) == new[:4]
    assert choose_again([], {}, set(), 1) == []
