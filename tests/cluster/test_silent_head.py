"""A cluster on this machine whose head does not answer."""

import sys
import time
from pathlib import Path

from tests.support.virtual_network import Network

SILENT = "10.77.0.99:6379"  # an address of the virtual network that no node has
RAYLET = f"exec -a raylet bash -c 'while :; do sleep 60; done' raylet --gcs-address={SILENT}"


def test_auto_is_refused_within_seconds(namespaces: None, tmp_path: Path) -> None:
    with Network(["one"], tmp_path) as network:
        node = network.nodes["one"]
        node.start("bash", "-c", RAYLET)
        started_s = time.monotonic()
        words = ["workload=probe", "cluster.address=auto", "plan=true"]
        result = node.run(sys.executable, "-m", "sweeper", *words, timeout=60, cwd=tmp_path)
        assert result.returncode == 2 and f"cluster.address={SILENT}: no Ray cluster responds" in result.stderr
        assert time.monotonic() - started_s < 20
