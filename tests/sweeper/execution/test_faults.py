"""All that can happen to a sweep, at random, for minutes: afterwards it has found what a quiet one finds."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import PROBE, Place, Server, processes_with, wait_for
from tests.support.ray_cluster import Apart, Cluster, ended, words_for

# What may end a driver, with 1, or keep it from starting, with 1 or 2.
TROUBLE = ("No space left on device", "does not answer; what had finished is kept", "nothing answers there")
TROUBLE += ("does not answer any more; nothing was started", "no Ray cluster answers there")


class Chaos:
    """A sweep on three nodes, one of them behind a cable, with MLflow's server and a small disk, and what befalls them.

    What was broken for a while is mended by what stands in `_mending`, with the time from when on.
    """

    def __init__(self, place: Place, cluster: Cluster, server: Server, disk: Path, trials: int, seed: int) -> None:
        self.place, self.cluster, self.server, self.disk, self.trials = place, cluster, server, disk, trials
        self.apart = Apart(cluster)
        self.done, self.driver_ended = Counter[str](), 0
        self._chance = random.Random(seed)
        self._mending: dict[str, tuple[float, Callable[[], None]]] = {}
        self.process = self._start()

    def _start(self) -> subprocess.Popen[str]:
        words = ("space.sleep_s=1.0", "trial.retries=1000", "trial.timeout_s=10", "name=chaos")
        words = (*words, f"dir={self.disk}", f"tracking.uri={self.server.uri}")
        said = words_for(self.place, self.cluster, self.trials, *words)
        return self.place.start(*said, RAY_AUTH_MODE="disabled", SWEEPER_TEST=self.place.path.name)

    # ── what happens ──

    def happenings(self) -> list[Callable[[], None]]:
        """But for the head, which takes a minute to be missed."""
        happens = [self.kill_worker, self.stop_worker, self.lose_node, self.join, self.kill_driver]
        return [*happens, self.cut_off, self.stop_server, self.fill_disk]

    def act(self) -> None:
        """One of them, by chance."""
        what = self._chance.choice(self.happenings())
        if what.__name__ not in self._mending:
            self.done[what.__name__] += 1
            what()

    def kill_worker(self, how: int = signal.SIGKILL) -> None:
        if workers := self.cluster.workers():
            with suppress(ProcessLookupError):
                os.kill(self._chance.choice(workers), how)

    def stop_worker(self) -> None:
        self.kill_worker(signal.SIGSTOP)

    def lose_node(self) -> None:
        self.cluster.lose(self.cluster.nodes.pop(self._chance.randrange(len(self.cluster.nodes))))
        self.cluster.nodes.append(self.cluster.add())

    def join(self) -> None:
        if len(self.cluster.nodes) < 4:
            self.cluster.nodes.append(self.cluster.add())

    def kill_driver(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()
        self.revive()

    def cut_off(self) -> None:
        self.apart.cut_off()
        self._mend_later("cut_off", self._chance.choice([2.0, 20.0]), self.apart.reconnect)

    def stop_server(self) -> None:
        self.server.kill()
        self._mend_later("stop_server", self._chance.uniform(2, 60), self.server.start)

    def fill_disk(self) -> None:
        filler = self.disk / "filler"
        with suppress(OSError), filler.open("wb") as file:
            while True:
                file.write(bytes(4096))
                file.flush()
        self._mend_later("fill_disk", self._chance.uniform(2, 10), lambda: filler.unlink())

    def lose_head(self) -> None:
        """With all nodes, at last; it is started again where it was."""
        self.done["lose_head"] += 1
        self.mend(everything=True)
        port = self.cluster.port
        self.cluster.lose_head()
        _, err = self.process.communicate(timeout=90)
        assert self.is_excused(err), err
        self.cluster.lose_all()
        self.apart.close()
        self.cluster = Cluster(2, port)
        self.apart = Apart(self.cluster)
        self.revive()

    # ── what is mended ──

    def _mend_later(self, what: str, in_s: float, how: Callable[[], None]) -> None:
        self._mending[what] = (time.monotonic() + in_s, how)

    def mend(self, *, everything: bool = False) -> None:
        """What is due; and a node in the place of one that did not survive."""
        for what, (at_s, how) in list(self._mending.items()):
            if everything or time.monotonic() > at_s:
                del self._mending[what]
                how()
        if self.apart.process.poll() is not None:
            self.apart.start()
        if self.cluster.up() < 3:
            self.cluster.nodes.append(self.cluster.add())

    def revive(self) -> None:
        """Start the driver again, when all that it needs is there."""
        self.driver_ended += 1
        self.mend(everything=True)
        self.process = self._start()

    def look(self) -> bool:
        """Whether the sweep goes on; a driver that ended as it may is started again."""
        if self.process.poll() is None:
            return True
        if self.process.returncode == 0:
            return False
        _, err = self.process.communicate()
        assert self.is_excused(err), err
        self.revive()
        return True

    def is_excused(self, err: str) -> bool:
        return self.process.returncode in (1, 2) and any(words in err for words in TROUBLE)

    def run(self, seconds: float) -> None:
        """Something happens each few seconds, and the head is lost half-way."""
        began_s, head_lost = time.monotonic(), False
        while time.monotonic() < began_s + seconds and self.look():
            self._pass(self._chance.uniform(2, 12))
            if not head_lost and time.monotonic() > began_s + seconds / 2:
                head_lost = True
                self.lose_head()
            self.act()
        self.mend(everything=True)

    def run_through(self) -> None:
        """Each of them once, in an order by chance."""
        happens = self.happenings()
        for what in self._chance.sample(happens, len(happens)):
            self._pass(2)
            assert self.look(), "the sweep ended before all had happened"
            self.done[what.__name__] += 1
            what()
        self._pass(2)
        self.mend(everything=True)

    def _pass(self, seconds: float) -> None:
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            time.sleep(0.5)
            self.mend()

    def finish(self) -> str:
        """Let the sweep come to its end in peace; what it said."""
        while True:
            out, err = self.process.communicate(timeout=1200)
            if not self.is_excused(err):
                assert self.process.returncode in (0, 1), err  # 1: some timed out
                return out + err
            self.revive()

    def close(self) -> None:
        self.mend(everything=True)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.apart.close()
        self.cluster.close()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    small = tmp_path / "disk"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40m", "tmpfs", str(small)], capture_output=True).returncode:
        pytest.skip("mounting needs root")
    yield small
    subprocess.run(["umount", "-l", str(small)], check=True)


@pytest.fixture
def chaos(
    request: pytest.FixtureRequest,
    place: Place,
    impatient: None,
    cluster: Cluster,
    server: Server,
    disk: Path,
) -> Iterator[Chaos]:
    found = Chaos(place, cluster, server, disk, *request.param)
    yield found
    found.close()


@pytest.mark.timeout(3000)
@pytest.mark.parametrize(
    ("seconds", "chaos"),
    [
        pytest.param(0, (60, 1), id="each_once"),
        pytest.param(100, (150, 1), id="short", marks=pytest.mark.soak),
        pytest.param(600, (1200, 0), id="ten_minutes", marks=pytest.mark.soak),
    ],
    indirect=["chaos"],
)
def test_whatever_happens_the_results_are_those_of_a_quiet_run(
    place: Place, tmp_path: Path, chaos: Chaos, seconds: float
) -> None:
    """Workers killed and stopped, nodes lost, joining, cut off, the driver and the head killed, MLflow's server away,
    the disk full. One outcome for each trial, nothing run again but what was under way when something died."""
    if seconds:
        chaos.run(seconds)
    else:
        chaos.run_through()
    said = chaos.finish()
    print(f"{dict(chaos.done)}, driver ended {chaos.driver_ended} times, {Counter(place_of(chaos).states())}")

    runs = place.runs("trial", chaos.server.uri)
    searched = [run for run in runs if "again_of" not in run.data.tags]
    assert len({run.data.tags["sweeper.trial"] for run in runs}) == len(runs)
    assert len(searched) == chaos.trials and not place_of(chaos).states()["RUNNING"], said
    outcomes = Counter(run.data.tags["outcome"] for run in searched)
    assert set(outcomes) <= {"complete", "timed_out"} and outcomes["timed_out"] < chaos.trials / 10, outcomes
    again = sum(int(run.data.tags["attempts"]) - 1 for run in runs) + len(runs) - len(searched)
    in_flight = 2 * 5 * chaos.driver_ended  # two trials of each gang
    assert ended(place).total() <= 2 * (chaos.trials + 2 * again + in_flight)  # one that is cut off runs its next, too
    assert len(ended(place)) >= 2 * outcomes["complete"]

    for pid in chaos.cluster.workers():  # one that was stopped sees only now that it is to end
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    wait_for(lambda: not chaos.cluster.workers())
    wait_for(lambda: not chaos.cluster.placement_groups())
    wait_for(lambda: not processes_with("SWEEPER_TEST", place.path.name))

    quiet = Place(tmp_path / "quiet")
    quiet.path.mkdir()
    words = [*PROBE, "search=random", "seed=3", f"budget.trials={chaos.trials}", "cluster.insecure=true"]
    done = quiet.run(*words, timeout_s=600)
    assert done.code == 0, done.err
    found, expected = results(place_of(chaos)), results(quiet)
    assert found.keys() == expected.keys()
    assert all(found[point] in (expected[point], None) for point in found)
    assert sum(value is None for value in found.values()) == outcomes["timed_out"]


def place_of(chaos: Chaos) -> Place:
    return Place(chaos.disk)


def results(place: Place) -> dict[Any, float | None]:
    """What came of each point of the search; None where it has no value."""
    searched = [trial for trial in place.trials() if "remeasurement" not in trial.user_attrs]
    return {(trial.params["x"], trial.params["y"]): trial.value for trial in searched}
