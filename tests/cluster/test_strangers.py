"""What a client without the token gets from a cluster, and where the secrets of a sweep can be read."""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from threading import Event, Thread

import pytest

from tests.conftest import environment, wait_for
from tests.support.stranger import UNAUTHENTICATED, UNIMPLEMENTED
from tests.support.virtual_cluster import Cluster, NodeWorkspace
from tests.support.virtual_mlflow import PORT, start_mlflow
from tests.support.virtual_network import Node
from tests.support.virtual_ports import HTTP, call_from, command_lines, environments, listeners, ray_methods

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]
# By the names of variables, of the driver, of Ray's processes and of the program.
SECRETS = {
    name: f"{name.lower()}-9b3f2a7c"
    for name in ("WANDB_API_KEY", "HF_TOKEN", "DB_PASSWORD", "APP_SECRET", "SIGNING_KEY")
}
PROGRAM_SECRETS = {"APP_TOKEN": "program-token-51d0", "api_key": "file-key-77e2", "PASSWORD": "tracking-password-c04e"}
# A trainer that prints all that it knows, as programs do when they start.
PROGRAM = """
import os, sys, time
print(dict(os.environ), sys.argv, open(sys.argv[1]).read(), flush=True)
for name, value in os.environ.items():
    print(f"{name}={value}", flush=True)
for step in range(10):
    if step == 5 and float(sys.argv[2]) > 0.5:
        raise RuntimeError(" ".join(os.environ.values()))
    time.sleep(0.3)
    print("took 0.3", flush=True)
"""
WORKLOAD = """# @package _global_
workload: {{name: command, objective: step_time_ms, direction: minimize}}
tracking: {{uri: "http://me:{password}@{store}"}}
command:
  run: [{python}, {folder}/program.py, "{{output}}/log.yaml", "{{x}}"]
  environment: {{APP_TOKEN: {token}}}
  files: {{log.yaml: {{wandb: {{api_key: {key}}}}}}}
  log: {{step_time_s: 'took ([0-9.]+)'}}
  warmup: 1
  steps: 9
space: {{x: "choice(0, 1)"}}
"""


@dataclass
class RunningSweep:
    """A sweep on two nodes with a store on a third, and what was seen of its processes until it ended."""

    cluster: Cluster
    workspace: NodeWorkspace
    printed: str = ""
    commands: set[str] = field(default_factory=set)  # the command lines of all processes
    variables: set[str] = field(default_factory=set)  # the environments of all processes

    @property
    def token(self) -> str:
        return (self.cluster.folder / "token").read_text()


@pytest.fixture(scope="module")
def cluster(namespaces: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("cluster")
    with Cluster(folder, ["first", "second"], others=["store", "stranger"], ray_variables=SECRETS) as cluster:
        start_mlflow(cluster.nodes["store"], folder)
        yield cluster


@pytest.fixture(scope="module")
def sweep(cluster: Cluster) -> RunningSweep:
    """Run a sweep to its end, watching the processes."""
    folder = cluster.folder / "sweep"
    (folder / "conf" / "workload").mkdir(parents=True)
    (folder / "program.py").write_text(PROGRAM)
    text = WORKLOAD.format(
        python=sys.executable,
        folder=folder,
        token=PROGRAM_SECRETS["APP_TOKEN"],
        key=PROGRAM_SECRETS["api_key"],
        password=PROGRAM_SECRETS["PASSWORD"],
        store=f"{cluster.nodes['store'].address}:{PORT}",
    )
    (folder / "conf" / "workload" / "own.yaml").write_text(text)
    running = RunningSweep(cluster, NodeWorkspace(folder, cluster))
    nodes, ended = cluster.nodes.values(), Event()

    def watch() -> None:
        while not ended.wait(0.2):
            running.commands.update(command_lines(nodes))
            running.variables.update(environments(nodes))

    watcher = Thread(target=watch, daemon=True)
    watcher.start()
    result = running.workspace.sweep("--config-dir=conf", "workload=own", "search=grid", "trial.retries=0")
    ended.set()
    watcher.join()
    assert result.code == 1 and "1 failed" in result.out, result.out + result.err
    running.printed = result.out + result.err
    return running


def test_no_method_of_any_port_answers_without_the_token(cluster: Cluster, tmp_path: Path) -> None:
    workspace = NodeWorkspace(cluster.folder / "probed", cluster)
    workspace.path.mkdir()
    driver = workspace.start_sweep("workload=probe", "search=random", "gpus=4", "budget.trials=500", "space.sleep_s=1")
    stranger, others = cluster.nodes["stranger"], [node for name, node in cluster.nodes.items() if name != "stranger"]
    wait_for(lambda: any("ray::Worker.run" in command for command in command_lines(others)), timeout_s=120)
    open_ports = [listener for node in others for listener in listeners(node) if not listener.is_local]
    head, port = cluster.address.split(":")
    known = (head, int(port), "ray.rpc.NodeInfoGcsService/GetAllNodeInfo")
    token = (cluster.folder / "token").read_text()
    (allowed,) = call_from(stranger, cluster.folder, [known], token)
    assert allowed["status"] == 0 and allowed["bytes"] > 100  # so the calls below could succeed
    (refused,) = call_from(stranger, cluster.folder, [known], f"{token[:-1]}x")
    assert refused["status"] == UNAUTHENTICATED

    answered, methods = [], ray_methods()
    for listener in open_ports:
        if listener.node is cluster.nodes["store"]:
            continue  # MLflow's server has no authentication of its own: docs/concepts/security.md says who reaches it
        calls = [(listener.node.address, listener.port, method) for method in [HTTP, *methods]]
        replies = call_from(stranger, cluster.folder, calls)
        (http,) = [reply for reply in replies if reply["method"] == HTTP]
        assert http["status"] in (-1, 401), (listener.command, http)
        served = [reply for reply in replies if reply["status"] not in (-1, UNIMPLEMENTED)]
        assert served, f"nothing was refused by {listener.command}: is it a service?"
        answered += [(listener.command, reply) for reply in served if reply["status"] not in (UNAUTHENTICATED, 401)]
        answered += [(listener.command, reply) for reply in replies if reply["bytes"]]
    assert not answered, answered
    assert len(open_ports) >= 3 * 4 and driver.poll() is None  # and the calls ended nothing
    driver.kill()


def test_only_ray_listens_on_every_interface(cluster: Cluster) -> None:
    for node in cluster.nodes.values():
        for listener in listeners(node):
            if listener.is_open_to_all:
                is_ray = any(name in listener.command for name in ("raylet", "gcs_server", "ray::", "-m sweeper"))
                assert is_ray, listener
            else:
                assert listener.is_local or listener.address == node.address, listener
    (store,) = listeners(cluster.nodes["store"])
    assert (store.address, store.port) == (cluster.nodes["store"].address, PORT)
    assert not listeners(cluster.nodes["stranger"])


@pytest.mark.skipif(find_spec("aiohttp_cors") is None, reason="the dashboard needs ray[default]")
def test_the_dashboard_gives_nothing_without_the_token(cluster: Cluster) -> None:
    """Ray's dashboard, with all of its processes, on a head of its own that listens as widely as it can."""
    node = cluster.nodes["stranger"]
    folder = cluster.folder / "dashboard.log"
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--include-dashboard=true"]
    command += ["--dashboard-host=0.0.0.0", f"--node-ip-address={node.address}", "--num-cpus=1", "--num-gpus=0"]
    with folder.open("w") as log:
        ray = node.start(*command, stdout=log, stderr=subprocess.STDOUT, env=environment(**cluster.variables))
    try:
        wait_for(lambda: any(listener.port == 8265 for listener in listeners(node)), timeout_s=120)
        paths = ["api/version", "nodes?view=summary", "api/jobs/", "api/v0/actors", "logs", "api/cluster_status"]
        for path in paths:
            url = f"http://{node.address}:8265/{path}"
            assert _get(cluster.nodes["first"], url) == 401, url
            token = (cluster.folder / "token").read_text()
            assert _get(cluster.nodes["first"], url, token) != 401, url
    finally:
        ray.terminate()
        ray.wait()


def _get(node: Node, url: str, token: str = "") -> int:
    """Return the HTTP status of a request from a node."""
    code = (
        "import sys, urllib.error, urllib.request as r\n"
        "q = r.Request(sys.argv[1], headers={'Authorization': 'Bearer ' + sys.argv[2]} if sys.argv[2] else {})\n"
        "try: print(r.urlopen(q, timeout=20).status)\n"
        "except urllib.error.HTTPError as error: print(error.code)\n"
    )
    result = node.run(sys.executable, "-c", code, url, token, check=True)
    return int(result.stdout)


def test_no_process_shows_a_secret_on_its_command_line(sweep: RunningSweep) -> None:
    assert len(sweep.commands) > 10 and any("program.py" in command for command in sweep.commands)
    for secret in (*SECRETS.values(), *PROGRAM_SECRETS.values(), sweep.token):
        assert not [command for command in sweep.commands if secret in command], secret


def test_no_process_has_the_token_in_its_environment(sweep: RunningSweep) -> None:
    assert any("RAY_AUTH_TOKEN_PATH=" in variables for variables in sweep.variables)
    assert not [variables for variables in sweep.variables if sweep.token in variables]


def test_no_file_of_the_sweep_the_store_or_a_node_holds_a_secret(sweep: RunningSweep) -> None:
    """The files are those of the sweep, with its report, the store and its artifacts, and /tmp of every node."""
    folders = [sweep.workspace.path, *(Path(f"/proc/{node.pid}/root/tmp") for node in sweep.cluster.nodes.values())]
    stored = [sweep.cluster.folder / "server.db", *(sweep.cluster.folder / "mlartifacts").rglob("*")]
    files = [path for folder in folders for path in folder.rglob("*")] + stored
    written = {"own.yaml", "token"}  # by the user
    read = 0
    for path in files:
        if path.is_file() and path.name not in written:
            content = path.read_bytes()
            read += 1
            for secret in (*SECRETS.values(), *PROGRAM_SECRETS.values(), sweep.token):
                assert secret.encode() not in content, (path, secret)
    assert read > 30 and any(path.name == "log.txt" for path in files)
    for secret in (*SECRETS.values(), *PROGRAM_SECRETS.values(), sweep.token):
        assert secret not in sweep.printed
