"""Promise 2: nothing finished is lost, nothing finished runs twice, wherever the driver is killed."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from tests.conftest import PROBE, Place, processes_with, wait_for


@pytest.mark.soak  # in CI `test_chaos.py` kills a driver, among the rest
@pytest.mark.timeout(1800)
def test_a_sweep_killed_at_any_instant_is_completed_exactly_once(place: Place) -> None:
    trials, kills, longest_s = 100, 25, 9.0
    ledger = place.path / "ledger"
    words = [*PROBE, f"budget.trials={trials}", "space.sleep_s=0.7", f"space.ledger={ledger}", "search=random"]
    instants = random.Random(7)
    for _ in range(kills):
        process = place.start(*words, SWEEPER_TEST=place.path.name)
        with pytest.raises(subprocess.TimeoutExpired):  # it has not come to its end
            process.wait(timeout=instants.uniform(0.2, longest_s))
        process.send_signal(signal.SIGKILL)
        process.communicate()
    done = place.run(*words)
    assert done.code == 0, done.err

    assert place.states() == {"COMPLETE": trials}
    runs = place.runs("trial")
    assert Counter(run.info.status for run in runs) == {"FINISHED": trials}
    assert sorted(int(run.data.tags["sweeper.trial"]) for run in runs) == list(range(trials))
    assert [run.info.status for run in place.runs("sweep")] == ["FINISHED"]
    ran = Counter(ledger.read_text().splitlines())
    assert len(ran) == trials
    twice = sum(count - 1 for count in ran.values())
    assert twice <= 2 * kills  # at most the two that a worker holds, each time
    wait_for(lambda: not workers_of(place.path.name))


def workers_of(mark: str) -> list[str]:
    """Processes of killed drivers that could still do harm: all but the agents that Ray leaves idling a minute."""
    lines = []
    for pid in processes_with("SWEEPER_TEST", mark):
        try:
            lines.append(Path(f"/proc/{pid}/cmdline").read_text())
        except OSError:
            continue
    return [line for line in lines if line and "Agent" not in line]


@pytest.mark.soak
def test_a_sigterm_to_the_sweeps_own_ray_too_is_an_end_in_order(place: Place) -> None:
    """As `timeout` and batch systems send it: to every process of the group."""
    process = place.start("workload=megatron", "gpus=2", "progress=always")  # fails soon and anew: Megatron is not here
    assert process.stderr is not None
    said = ""
    while "trial 1 failed" not in said:
        line = process.stderr.readline()
        assert line, said
        said += line
    os.killpg(process.pid, signal.SIGTERM)
    out, _ = process.communicate(timeout=100)
    assert process.returncode == 130
    assert re.search(r": \d failed", out) and "resume   " in out
    assert [run.info.status for run in place.runs("sweep")] == ["KILLED"]
    assert not place.states()["RUNNING"]


@pytest.mark.soak
def test_the_recording_process_may_be_killed_too(place: Place) -> None:
    process = place.start(*PROBE, "budget.trials=20", "space.sleep_s=0.3", SWEEPER_TEST=place.path.name)

    def recorder() -> int | None:
        for pid in processes_with("SWEEPER_TEST", place.path.name):
            try:
                with open(f"/proc/{pid}/cmdline") as line:
                    if "sweeper.tracking.process" in line.read():
                        return pid
            except OSError:
                continue
        return None

    wait_for(lambda: list(place.path.glob("sweeps/*/study.journal")) and place.path.joinpath("mlruns").exists())
    os.kill(wait_for(recorder), signal.SIGKILL)
    _, err = process.communicate(timeout=90)
    assert process.returncode == 0, err
    assert Counter(run.info.status for run in place.runs("trial")) == {"FINISHED": 20}
    assert len({run.data.tags["sweeper.trial"] for run in place.runs("trial")}) == 20
