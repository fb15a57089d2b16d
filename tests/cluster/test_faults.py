"""Sweeps under faults of nodes and network: every trial ends once, and nothing is left."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import cluster_faults
from tests.support.faulty_sweep import FaultySweep, Outcome


@pytest.fixture(scope="module")
def world(namespaces: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[cluster_faults.World]:
    world = cluster_faults.World(tmp_path_factory.mktemp("world"))
    yield world
    world.close()


def assert_nothing_lost(outcome: Outcome, trials: int | None = None) -> None:
    """`trials`: the budget of a sweep that no time ended."""
    assert (outcome.lost, outcome.doubled) == (0, 0) and trials in (None, outcome.trials), outcome
    assert (outcome.left_over, outcome.running, outcome.misdated) == (0, 0, 0), outcome


@pytest.mark.long(25)
def test_a_short_sequence_of_faults_loses_no_trial(namespaces: None, tmp_path: Path) -> None:
    """A worker's link, one direction between the driver and a worker, and a whole node, one after the other."""
    world = cluster_faults.World(tmp_path, is_whole=False)
    folder = tmp_path / "short"
    folder.mkdir()
    first, second = cluster_faults.WORKERS
    faults = [
        cluster_faults.Fault(cluster_faults.cut_link, 2, first),
        cluster_faults.Fault(cluster_faults.block_from_driver, 2, first),
        cluster_faults.Fault(cluster_faults.lose_node, 0, second),
    ]
    try:
        outcome = FaultySweep(world, folder, trials=16, sleep_s=0.5).run(faults, random.Random(0), (0.2, 0.5), 300)
    finally:
        world.close()
    assert outcome.faults == len(faults)
    assert_nothing_lost(outcome, 16)


@pytest.mark.soak
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("name", cluster_faults.FAULTS)
def test_every_trial_ends_once_under(name: str, world: cluster_faults.World) -> None:
    folder = world.cluster.folder / name.replace(" ", "_").replace(",", "").replace("/", "")
    folder.mkdir()
    sweep = FaultySweep(world, folder, trials=40)
    outcome = sweep.run([cluster_faults.FAULTS[name]], random.Random(0), (2.0, 6.0), limit_s=900)
    assert outcome.faults == 1
    assert_nothing_lost(outcome, 40)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_sweep_on_cpus_ends_once_its_drivers_node_is_lost(world: cluster_faults.World) -> None:
    """For 45 s: the head takes the node for lost after about 30 s, and is itself taken for lost after 55 s."""
    folder = world.cluster.folder / "cpu"
    folder.mkdir()
    sweep = FaultySweep(world, folder, trials=20, overrides=["hardware=cpu", "gpus=4"])
    outcome = sweep.run(
        [cluster_faults.Fault(cluster_faults.cut_link, 45, cluster_faults.DRIVER)],
        random.Random(0),
        (5.0, 6.0),
        limit_s=600,
    )
    assert outcome.starts > 1, outcome
    assert_nothing_lost(outcome, 20)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_sweep_on_the_cpus_of_all_nodes_goes_on_with_a_node_that_comes_back(world: cluster_faults.World) -> None:
    """Its gang takes every core of the cluster, so nothing runs until the node has come back, under a new id."""
    folder = world.cluster.folder / "all_cpus"
    folder.mkdir()
    sweep = FaultySweep(world, folder, trials=20, overrides=["hardware=cpu", "gpus=8"])
    outcome = sweep.run([cluster_faults.Fault(cluster_faults.kill_node, 10)], random.Random(0), (5.0, 6.0), limit_s=300)
    assert outcome.starts == 1, outcome
    assert_nothing_lost(outcome, 20)


@pytest.mark.soak
@pytest.mark.timeout(2400)
def test_every_trial_ends_once_under_faults_drawn_at_random(world: cluster_faults.World) -> None:
    folder = world.cluster.folder / "random"
    folder.mkdir()
    rng = random.Random(1)
    sweep = FaultySweep(world, folder, trials=300, sleep_s=2.0, minutes=10)
    outcome = sweep.run(cluster_faults.draw_faults(rng), rng, (5.0, 20.0), limit_s=1200)
    assert outcome.faults > 1, outcome
    assert_nothing_lost(outcome)
