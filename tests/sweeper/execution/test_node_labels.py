"""Gangs on real Ray nodes that are selected by labels: a type of accelerator, excluded nodes and NVLink domains."""

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.conftest import environment, wait_for
from tests.support.ray_cluster import Cluster

pytestmark = [pytest.mark.soak, pytest.mark.parametrize("cluster", [0], indirect=True)]

# Connects to the cluster, and runs the statements of a test with its nodes with GPUs in the order of their ids.
PROGRAM = """
import json, sys
import ray
from sweeper.config.catalogue import catalogue
from sweeper.execution import gang_launcher
from sweeper.execution.cluster import discover_nodes
from sweeper.execution.gang_launcher import GangLauncher, GangResources, GangSpec
from sweeper.execution.gang_pool import GangPool
from sweeper.preflight.devices import select_target
gang_launcher.MAX_IDS = 0  # few nodes are selected as many are
nodes = sorted((node for node in discover_nodes(sys.argv[1], insecure=True) if node.gpus), key=lambda node: node.id)
target = select_target(catalogue()["h200"], nodes, 1)
show = lambda value: print(json.dumps(value), flush=True)
placed = lambda gang: [location["node_id"] for location in ray.get(gang.handshakes, timeout=60)]
"""


@pytest.fixture
def run(cluster: Cluster) -> Iterator[Any]:
    """Return a function that starts a program on the cluster."""
    programs = []

    def start(statements: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", PROGRAM + statements, cluster.address]
        programs.append(
            subprocess.Popen(command, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        )
        return programs[-1]

    yield start
    for program in programs:
        program.kill()
        program.communicate()


def read(program: subprocess.Popen[str]) -> Any:
    assert program.stdout is not None
    return json.loads(program.stdout.readline())


def test_a_gang_over_several_nodes_stays_in_one_nvlink_domain(cluster: Cluster, run: Any) -> None:
    """Five nodes of two GPUs in domains of one, two and two: two gangs of four run at once, each in one domain."""
    for domain in ("a", "b", "b", "c", "c"):
        cluster.add_labeled(domain)
    program = run("""
show({node.id: node.gpu_domain for node in nodes})
show([target.count_gangs(4, None), target.fits_gpu_domain(4), target.fits_gpu_domain(6)])
launcher = GangLauncher(target, GangResources(4), 1)
show(launcher._selector)
show([placed(launcher.launch()) for _ in range(2)])
waiting = launcher.launch()  # on the nodes that are left, it would span two domains
show(len(ray.wait(waiting.handshakes, num_returns=4, timeout=10)[0]))
""")
    domains = read(program)
    assert sorted(domains.values()) == ["a", "b", "b", "c", "c"]
    assert read(program) == [2, True, False]
    assert read(program) == {"ray.io/accelerator-type": "H200"}
    gangs = read(program)
    assert sorted([domains[node] for node in gang] for gang in gangs) == [["b"] * 4, ["c"] * 4], gangs
    assert all(len({*gang}) == 2 for gang in gangs) and read(program) == 0


def test_gangs_start_on_no_node_that_is_excluded(cluster: Cluster, run: Any) -> None:
    for _ in range(3):
        cluster.add_labeled()
    program = run("""
show([node.id for node in nodes])
launcher = GangLauncher(target.without_nodes([nodes[0].id]), GangResources(1), 1)
show(launcher._selector)
gangs = [launcher.launch() for _ in range(5)]
show([placed(gang)[0] for gang in gangs[:4]])
show(len(ray.wait(gangs[4].handshakes, timeout=10)[0]))
""")
    excluded, *others = read(program)
    assert read(program) == {"ray.io/accelerator-type": "H200", "ray.io/node-id": f"!in({excluded})"}
    assert sorted(read(program)) == sorted(2 * others) and read(program) == 0


def test_a_gang_that_lands_on_a_node_that_has_just_joined_is_replaced(cluster: Cluster, run: Any) -> None:
    """The monitor has not accepted the node yet: it may have other devices of the same type, or be unusable."""
    cluster.add_labeled()
    program = run("""
pool = GangPool(target, GangSpec("probe", {}, None, GangResources(2), 60), 2)
while not any(gang.ready for gang in pool.gangs):
    pool.wait(0.1)
show([nodes[0].id])
input()
seen = [gang for gang in pool.gangs if not gang.ready]
while seen[0] in pool.gangs:
    pool.wait(0.1)
show([seen[0].killed, seen[0].node_ids, pool._launcher._selector, pool._failed_starts])
""")
    (first,) = read(program)
    cluster.add_labeled()
    wait_for(lambda: cluster.count_alive() == 3)
    program.stdin.write("\n")
    program.stdin.flush()
    killed, (joined,), selector, failed_starts = read(program)
    assert killed and joined != first and failed_starts == 0
    assert selector == {"ray.io/node-id": f"in({first})"}  # shorter than the type without the other one
