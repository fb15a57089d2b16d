"""MLflow's server on a node of a virtual network."""

import subprocess
import sys
from pathlib import Path

from tests.conftest import environment, wait_for
from tests.support.virtual_network import Node

PORT = 5000


def uri_of(node: Node) -> str:
    return f"http://{node.address}:{PORT}"


def start_mlflow(node: Node, folder: Path) -> subprocess.Popen[str]:
    """Start the server with a store in the folder, and return once it answers."""
    command = [sys.executable, "-m", "mlflow", "server", "--host", node.address, "--port", str(PORT)]
    command += ["--backend-store-uri", f"sqlite:///{folder}/server.db", "--workers", "1", "--allowed-hosts", "*"]
    variables = environment(MLFLOW_SERVER_ENABLE_JOB_EXECUTION="false", MLFLOW_DISABLE_TELEMETRY="true")
    log = (folder / "server.log").open("a")
    server = node.start(*command, folder=folder, stdout=log, stderr=subprocess.STDOUT, env=variables)
    request = f"import urllib.request as request; request.urlopen('{uri_of(node)}/health', timeout=5)"
    wait_for(lambda: not node.run("python3", "-c", request).returncode, timeout_s=180)
    return server
