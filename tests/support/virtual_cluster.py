"""A Ray cluster over the nodes of a virtual network, with a token, and sweeps that run in it."""

import secrets
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from tests.conftest import CommandResult, Workspace, environment
from tests.support import lean_ray
from tests.support.virtual_network import Network, Node, send_signal

HEAD_PORT = 6379
GPUS = 2  # of each node with devices; Ray only counts them
START_TIMEOUT_S = 120.0
STARTED = "Ray runtime started."  # what `ray start` prints once the node is registered


class Cluster:
    """A head without devices, and workers with two devices each.

    Args:
        folder: a folder that all nodes share. It holds the token and the sweeps.
        workers: the names of the nodes with devices.
        drivers: nodes of Ray without devices, for drivers that do not run on the head.
        others: further nodes of the network, on which nothing is started.
        ray_variables: variables of Ray's own processes and of the drivers.
    """

    def __init__(
        self,
        folder: Path,
        workers: Sequence[str],
        drivers: Sequence[str] = (),
        others: Sequence[str] = (),
        ray_variables: dict[str, str] | None = None,
    ) -> None:
        self.folder, self._workers = folder, workers
        token = folder / "token"
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32))
        self.rays: dict[str, subprocess.Popen[str]] = {}
        self.variables = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), **(ray_variables or {})}
        self.network = Network(["head", *drivers, *workers, *others], folder)
        try:
            self.start_head()
            for name in (*drivers, *workers):
                self.start_node(name)
        except BaseException:
            self.close()
            raise

    @property
    def nodes(self) -> dict[str, Node]:
        return self.network.nodes

    @property
    def address(self) -> str:
        return f"{self.network.addresses['head']}:{HEAD_PORT}"

    def start_head(self) -> None:
        self.start_ray("head", "--head", f"--port={HEAD_PORT}", "--include-dashboard=false", "--num-gpus=0")

    def start_worker(self, name: str, **variables: str) -> None:
        devices = [f"--num-gpus={GPUS}", '--resources={"accelerator_type:H200": 1}']
        self.start_ray(name, f"--address={self.address}", *devices, **variables)

    def start_ray(self, name: str, *arguments: str, **variables: str) -> None:
        """Start Ray on a node, and return once it is a part of the cluster."""
        node = self.nodes[name]
        sizes = ["--num-cpus=2", "--memory=8000000000", "--object-store-memory=80000000"]
        ray = node.start(
            *lean_ray.command(*arguments, f"--node-ip-address={node.address}", *sizes, "--block"),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment(**self.variables, **lean_ray.VARIABLES, **variables),
        )
        watchdog = threading.Timer(START_TIMEOUT_S, ray.kill)
        watchdog.start()
        assert ray.stdout is not None
        printed: list[str] = []
        for line in ray.stdout:
            printed.append(line)
            if STARTED in line:
                break
        else:
            raise RuntimeError(f"Ray did not start on {name}: {''.join(printed)}")
        watchdog.cancel()
        self.rays[name] = ray
        threading.Thread(target=ray.stdout.read, daemon=True).start()  # else Ray waits once the pipe is full

    def revive(self, name: str) -> None:
        """Start Ray again on a node where it has ended, as the operator of a cluster does."""
        if self.rays[name].poll() is not None:
            self.start_head() if name == "head" else self.start_node(name)

    def start_node(self, name: str) -> None:
        """Start a worker, or a node without devices for a driver."""
        if name in self._workers:
            self.start_worker(name)
        else:
            self.start_ray(name, f"--address={self.address}", "--num-gpus=0")

    def restore(self, name: str) -> None:
        """Start a killed node again, with the same name and address."""
        self.network.add(name)
        self.start_node(name)

    def close(self) -> None:
        self.network.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class NodeWorkspace(Workspace):
    """A folder whose commands run on one node of a cluster, the head if no other is named."""

    def __init__(self, path: Path, cluster: Cluster, node: str = "head") -> None:
        super().__init__(path)
        self.cluster, self.node = cluster, node

    def command(self, *arguments: str) -> list[str]:
        return self.cluster.nodes[self.node].command(*super().command(*arguments), folder=self.path)

    def start(self, *arguments: str, **variables: str) -> subprocess.Popen[str]:
        return super().start(*arguments, **self.cluster.variables, **variables)

    def sweep(self, *overrides: str, timeout_s: float = 300) -> CommandResult:
        """Run a sweep on the devices of the cluster."""
        return self.run(*self.arguments(*overrides), timeout_s=timeout_s)

    def start_sweep(self, *overrides: str) -> subprocess.Popen[str]:
        return self.start(*self.arguments(*overrides))

    def arguments(self, *overrides: str) -> list[str]:
        where = [f"cluster.address={self.cluster.address}", "hardware=h200", "progress=never"]
        return [*where, "finals.top=0", *overrides]

    def interrupt(self, process: subprocess.Popen[str], number: int) -> None:
        send_signal(process, number)
