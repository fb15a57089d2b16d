"""The nodes of the virtual network are separate machines as far as a program can tell, and leave nothing."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY, wait_for
from tests.support.virtual_network import Network, send_signal

PORT = 7000
LISTEN = f"import socket; s = socket.create_server(('', {PORT})); print('up', flush=True)\nwhile True: s.accept()"
CONNECT = f"import socket, sys; socket.create_connection((sys.argv[1], {PORT}), 1)"


@pytest.fixture(scope="module")
def network(namespaces: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    """Nodes `one` and `two`; `two` accepts connections."""
    with Network(["one", "two"], tmp_path_factory.getbasetemp()) as network:
        server = network.nodes["two"].start(sys.executable, "-c", LISTEN, stdout=subprocess.PIPE)
        assert server.stdout is not None and server.stdout.readline() == "up\n"
        yield network


def can_connect(network: Network) -> bool:
    return not network.nodes["one"].run(sys.executable, "-c", CONNECT, "two").returncode


def test_a_node_has_its_own_name_address_and_temporary_files(network: Network, tmp_path: Path) -> None:
    one, two = network.nodes["one"], network.nodes["two"]
    assert one.run("hostname").stdout == "one\n" and two.run("hostname").stdout == "two\n"
    assert "10.77.0.11/24" in one.run("ip", "address").stdout
    one.run("touch", "/tmp/of_one", "/dev/shm/of_one", str(tmp_path / "shared"), check=True)
    for folder in ("/tmp", "/dev/shm"):
        assert not Path(folder, "of_one").exists() and two.run("ls", f"{folder}/of_one").returncode
    assert (tmp_path / "shared").exists() and not two.run("ls", str(tmp_path / "shared")).returncode


def test_a_disconnected_node_gets_nothing_until_it_is_connected_again(network: Network) -> None:
    assert can_connect(network)
    network.disconnect("two")
    assert not can_connect(network)
    network.connect("two")
    assert wait_for(lambda: can_connect(network), timeout_s=10)


def test_a_blocked_direction_lets_the_other_one_pass(network: Network) -> None:
    """`two` still gets packets of `one`, so a connection fails only where the answer is dropped."""
    receive = "import socket; s = socket.socket(type=socket.SOCK_DGRAM); s.bind(('', 7001)); print('up', flush=True)"
    receive += "\nprint(s.recv(9).decode(), flush=True)"
    send = "import socket; socket.socket(type=socket.SOCK_DGRAM).sendto(b'datagram', ('two', 7001))"
    network.block("two", "one")
    try:
        receiver = network.nodes["two"].start(sys.executable, "-c", receive, stdout=subprocess.PIPE)
        assert receiver.stdout is not None and receiver.stdout.readline() == "up\n"
        network.nodes["one"].run(sys.executable, "-c", send, check=True)
        assert receiver.stdout.readline() == "datagram\n" and receiver.wait(timeout=10) == 0
        assert not can_connect(network)
    finally:
        network.unblock("two", "one")
    assert can_connect(network)


def test_a_signal_reaches_the_program_in_the_node(network: Network) -> None:
    program = "import signal, time\nsignal.signal(2, lambda *_: exit(7)); print('up', flush=True); time.sleep(60)"
    process = network.nodes["one"].start(sys.executable, "-c", program, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    send_signal(process, signal.SIGINT)
    assert process.wait(timeout=10) == 7


def test_a_node_outlives_all_of_its_programs(network: Network) -> None:
    node = network.nodes["one"]
    program = node.start("sleep", "1000")
    killed = wait_for(lambda: node.pids_of("sleep\x001000") and node.pids())
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    program.wait(timeout=10)
    wait_for(lambda: set(killed).isdisjoint(node.pids()), timeout_s=10)
    assert node.run("hostname").stdout == "one\n"


def test_nothing_is_left_when_the_creator_is_killed(namespaces: None) -> None:
    program = """
from pathlib import Path
from tests.support.virtual_network import Network
network = Network(["one"], Path("/"))
network.nodes["one"].start("setsid", "sleep", "1000")
while not (pids := [pid for pid in network.nodes["one"].pids() if "setsid" not in open(f"/proc/{pid}/comm").read()]):
    pass
print(network._switch.pid, network.nodes["one"].creator.pid, network.nodes["one"].pid, *pids, flush=True)
input()
"""
    creator = subprocess.Popen(
        [sys.executable, "-c", program], cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert creator.stdout is not None
    pids = creator.stdout.readline().split()
    assert len(pids) >= 4 and all(Path("/proc", pid).exists() for pid in pids)
    creator.kill()
    creator.communicate()
    wait_for(lambda: not any(is_running(pid) for pid in pids), timeout_s=10)


def is_running(pid: str) -> bool:
    """Return whether the process has not ended; one that nobody has waited for has."""
    try:
        return Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
