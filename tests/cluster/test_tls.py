"""Ray's TLS between nodes: a sweep runs as without it, and nobody can talk to a node in plain text."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.virtual_cluster import Cluster, NodeWorkspace
from tests.support.virtual_network import SUBNET
from tests.support.virtual_ports import call_from, listeners

pytestmark = [pytest.mark.soak, pytest.mark.skipif(shutil.which("openssl") is None, reason="certificates need openssl")]
HANDSHAKE = """
import socket, ssl, sys
context = ssl.create_default_context(cafile=sys.argv[3])
with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=5) as connection:
    context.wrap_socket(connection, server_hostname=sys.argv[1])
"""


def make_certificates(folder: Path) -> dict[str, str]:
    """Make an authority and a certificate for all addresses of the network. Returns Ray's variables."""

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], check=True, capture_output=True, cwd=folder)

    addresses = [f"IP:{SUBNET}.{number}" for number in range(11, 20)]
    (folder / "names").write_text(f"subjectAltName=DNS:localhost,IP:127.0.0.1,{','.join(addresses)}\n")
    new_key = ["-newkey", "rsa:2048", "-nodes"]
    openssl("req", "-x509", *new_key, "-keyout", "ca.key", "-out", "ca.crt", "-days", "2", "-subj", "/CN=authority")
    openssl("req", *new_key, "-keyout", "node.key", "-out", "node.csr", "-subj", "/CN=node")
    signer = ["-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "names"]
    openssl("x509", "-req", "-in", "node.csr", "-out", "node.crt", *signer)
    files = {"SERVER_CERT": "node.crt", "SERVER_KEY": "node.key", "CA_CERT": "ca.crt"}
    return {"RAY_USE_TLS": "1", **{f"RAY_TLS_{name}": str(folder / file) for name, file in files.items()}}


@pytest.fixture(scope="module")
def cluster(namespaces: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("cluster")
    with Cluster(folder, ["first", "second"], others=["stranger"], ray_variables=make_certificates(folder)) as cluster:
        yield cluster


def test_a_sweep_runs_on_nodes_with_tls(cluster: Cluster) -> None:
    head = NodeWorkspace(cluster.folder / "sweep", cluster)
    head.path.mkdir()
    result = head.sweep("workload=probe", "search=random", "gpus=2", "budget.trials=4")
    assert result.code == 0 and head.outcomes() == {"complete": 4}, result.err


def test_a_call_in_plain_text_gets_nothing_also_with_the_token(cluster: Cluster) -> None:
    token, stranger = (cluster.folder / "token").read_text(), cluster.nodes["stranger"]
    for node in (cluster.nodes["head"], cluster.nodes["first"]):
        for listener in listeners(node):
            if not listener.is_open_to_all:
                continue  # Ray's agent for runtime environments speaks HTTP, to its own node
            call = (node.address, listener.port, "ray.rpc.NodeInfoGcsService/GetAllNodeInfo")
            (reply,) = call_from(stranger, cluster.folder, [call], token)
            assert (reply["status"], reply["bytes"]) == (-1, 0), listener
            check = [HANDSHAKE, node.address, str(listener.port), str(cluster.folder / "ca.crt")]
            shaken = stranger.run(sys.executable, "-c", *check)
            assert shaken.returncode == 0, (listener, shaken.stderr)
