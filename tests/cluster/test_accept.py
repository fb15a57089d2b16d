"""An acceptance of four nodes, of which one has a slow, a lossy or a cut link, hangs or dies, while a fifth joins."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import environment
from tests.support.virtual_cluster import Cluster
from tests.support.virtual_network import Network


def stop_processes(network: Network) -> None:
    for pid in network.nodes["second"].pids():
        os.kill(pid, signal.SIGSTOP)


FAULTS: dict[str, Callable[[Network], None]] = {
    "slow": lambda network: network.limit_rate("second", 100_000),
    "lossy": lambda network: network.limit_rate("second", 1_000_000, "burst 5kb limit 10kb"),
    "cut": lambda network: network.disconnect("second"),
    "hangs": stop_processes,
    "dies": lambda network: network.nodes["second"].kill(),
}


@pytest.mark.soak
@pytest.mark.timeout(400)
@pytest.mark.parametrize("fault", FAULTS)
def test_the_verdict_is_on_the_rest_and_a_bad_link_has_its_node_as_the_cause(
    fault: str, namespaces: None, tmp_path: Path
) -> None:
    with Cluster(tmp_path, ["first", "second", "third"], others=["joins"]) as cluster:
        command = [sys.executable, "-u", "-m", "sweeper", "accept", "hardware=cpu"]
        command += [f"cluster.address={cluster.address}", f"dir={tmp_path}"]
        options = {"stdout": subprocess.PIPE, "env": environment(**cluster.variables)}
        process = cluster.nodes["head"].start(*command, folder=tmp_path, **options)
        assert process.stdout
        next(line for line in process.stdout if "second: node training" in line)
        FAULTS[fault](cluster.network)
        cluster.start_ray("joins", f"--address={cluster.address}")
        output = process.stdout.read()
    (path,) = tmp_path.glob("acceptance/*/accept.json")
    record = json.loads(path.read_text())
    links = [row for row in record["results"] if row["scope"] == "link"]
    bad = [row for row in links if "second" in row["nodes"]]
    assert len(bad) == 2 and {*record["nodes"]} == {"head", "first", "second", "third"}, output
    assert {row["verdict"] for row in bad} == {"fail" if fault in ("slow", "lossy") else "inconclusive"}, output
    is_named = [row["cause"].startswith("second is slow with most of its partners") for row in bad]
    assert all(is_named) or fault in ("hangs", "dies"), output
    assert all(row["value"] for row in links if row not in bad), output
