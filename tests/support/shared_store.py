"""A store that several users share: MLflow's server with its basic authentication, on PostgreSQL, on this machine."""

import base64
import importlib.util
import json
import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from tests.conftest import environment, wait_for

ADMIN = "admin"
MODULES = {"flask_wtf": "mlflow[auth]", "psycopg2": "psycopg2-binary"}  # what MLflow's server needs for it
# Checking a password takes 80 ms of CPU time, so servers keep the result for a while.
CONFIGURATION = """
[mlflow]
default_permission = READ
database_uri = {uri}
admin_username = {admin}
authorization_function = mlflow.server.auth:authenticate_request_basic_auth
auth_cache_ttl_seconds = {cache_s}
"""


def missing_reason() -> str:
    """Return what this machine lacks for such a store, or an empty string."""
    missing = [package for module, package in MODULES.items() if not importlib.util.find_spec(module)]
    missing += [] if _find_postgres("initdb") else ["postgresql"]
    return f"not installed: {', '.join(missing)}" if missing else ""


def _find_postgres(program: str) -> str:
    """Return the path of a program of PostgreSQL; Debian has them outside of PATH. Empty where there is none."""
    installed = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{program}"))
    return shutil.which(program) or (str(installed[-1]) if installed else "")


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def count_cpu_s(pid: int) -> float:
    """Return the CPU time of a process and of its descendants, as far as they run or their parents know them."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return 0.0
    own_s = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")  # user and system time, also of ended children
    return own_s + sum(count_cpu_s(int(child)) for child in children)


class SharedStore:
    """PostgreSQL with a password, MLflow's server in front of it, and users that are no administrators.

    Args:
        workers: processes of MLflow's server.
        cache_s: for how long the server remembers that a password was right; 0: it checks it at each request.
    """

    def __init__(self, workers: int = 2, cache_s: int = 60) -> None:
        self._workers = workers
        self._temporary = tempfile.TemporaryDirectory(prefix="store")
        self.folder = Path(self._temporary.name)
        self.port, self._database_port = _free_port(), _free_port()
        self.uri = f"http://127.0.0.1:{self.port}"
        self.database_uri = f"postgresql+psycopg2://mlflow@127.0.0.1:{self._database_port}"
        self.passwords = {name: secrets.token_hex(16) for name in (ADMIN, "database", "server")}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._ended_cpu_s = 0.0  # of servers that were stopped
        text = CONFIGURATION.format(uri=f"{self.database_uri}/users", admin=ADMIN, cache_s=cache_s)
        (self.folder / "auth.ini").write_text(text)
        try:
            self._start_database()
            self.start_server()
        except BaseException:
            self.close()
            raise

    def _start_database(self) -> None:
        """Make a database and start its server, which refuses to run as root."""
        owner = pwd.getpwnam("nobody") if os.geteuid() == 0 else pwd.getpwuid(os.geteuid())
        data, password = self.folder / "data", self.folder / "password"
        password.touch(mode=0o600)
        password.write_text(self.passwords["database"])
        for path in (self.folder, password):
            os.chown(path, owner.pw_uid, owner.pw_gid)
        rights: dict[str, Any] = {"user": owner.pw_uid, "group": owner.pw_gid} if os.geteuid() == 0 else {}
        options = ["--username=mlflow", f"--pwfile={password}", "--auth=scram-sha-256", "--encoding=UTF8"]
        subprocess.run(
            [_find_postgres("initdb"), f"--pgdata={data}", *options], check=True, capture_output=True, **rights
        )
        password.unlink()
        addresses = ["-c", "listen_addresses=127.0.0.1", "-c", "unix_socket_directories="]
        with (self.folder / "database.log").open("ab") as log:
            self._processes["database"] = subprocess.Popen(
                [_find_postgres("postgres"), "-D", str(data), "-p", str(self._database_port), *addresses],
                stdout=log,
                stderr=log,
                start_new_session=True,
                **rights,
            )
        wait_for(lambda: not self._create("mlflow").returncode, timeout_s=60)
        self._create("users").check_returncode()

    def _create(self, database: str) -> subprocess.CompletedProcess[bytes]:
        return self.query(f"create database {database}", "postgres", check=False)

    def query(self, sql: str, database: str = "mlflow", check: bool = True) -> subprocess.CompletedProcess[bytes]:
        """Run a statement in PostgreSQL, and return what it prints: rows without headers."""
        options = ["--host=127.0.0.1", f"--port={self._database_port}", "--username=mlflow", f"--dbname={database}"]
        command = ["psql", *options, "--tuples-only", "--no-align", f"--command={sql}"]
        variables = {**os.environ, "PGPASSWORD": self.passwords["database"]}
        return subprocess.run(command, env=variables, capture_output=True, check=check)

    def start_server(self) -> None:
        """Start MLflow's server, and return once it answers."""
        command = [sys.executable, "-m", "mlflow", "server", "--app-name", "basic-auth", "--host", "127.0.0.1"]
        command += ["--port", str(self.port), "--workers", str(self._workers)]
        command += ["--backend-store-uri", f"{self.database_uri}/mlflow"]
        command += ["--artifacts-destination", str(self.folder / "artifacts")]
        variables = {
            "PGPASSWORD": self.passwords["database"],
            "MLFLOW_AUTH_CONFIG_PATH": str(self.folder / "auth.ini"),
            "MLFLOW_AUTH_ADMIN_PASSWORD": self.passwords[ADMIN],
            "MLFLOW_FLASK_SERVER_SECRET_KEY": self.passwords["server"],
            "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
            "MLFLOW_DISABLE_TELEMETRY": "true",
        }
        with (self.folder / "server.log").open("ab") as log:
            self._processes["server"] = subprocess.Popen(
                command, cwd=self.folder, env=environment(**variables), stdout=log, stderr=log, start_new_session=True
            )
        wait_for(self._answers, timeout_s=180)

    def _answers(self) -> bool:
        assert self._processes["server"].poll() is None, (self.folder / "server.log").read_text()[-3000:]
        try:
            return bool(urllib.request.urlopen(f"{self.uri}/health", timeout=5).status == 200)
        except OSError:
            return False

    def stop_server(self, number: int = signal.SIGTERM) -> None:
        """End the server by this signal: SIGTERM to the parent as an operator does, SIGKILL to all of its processes."""
        server = self._processes.pop("server")
        self._ended_cpu_s += count_cpu_s(server.pid)
        os.kill(server.pid, number) if number == signal.SIGTERM else os.killpg(server.pid, number)
        server.wait()

    def add_user(self, name: str) -> dict[str, str]:
        """Add a user, and return the variables with which this user's commands use the store."""
        password = self.passwords[name] = secrets.token_hex(16)
        self.request("/api/2.0/mlflow/users/create", ADMIN, {"username": name, "password": password})
        return {"MLFLOW_TRACKING_USERNAME": name, "MLFLOW_TRACKING_PASSWORD": password}

    def request(self, path: str, user: str, content: dict[str, str] | None = None, method: str | None = None) -> Any:
        """Send a request to MLflow's server and return its answer; without content a GET."""
        credentials = base64.b64encode(f"{user}:{self.passwords[user]}".encode()).decode()
        headers = {"Authorization": f"Basic {credentials}", "Content-Type": "application/json"}
        data = json.dumps(content).encode() if content else None
        request = urllib.request.Request(self.uri + path, data, headers, method=method)
        with urllib.request.urlopen(request, timeout=30) as response:
            return json.load(response)

    def files_with(self, text: str, folders: Sequence[Path]) -> list[Path]:
        """Return the files in these folders that contain a text."""
        files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
        return [path for path in files if text.encode() in path.read_bytes()]

    def cpu_s(self) -> float:
        """Return the CPU time of MLflow's server and of PostgreSQL since they were started."""
        return self._ended_cpu_s + sum(count_cpu_s(process.pid) for process in self._processes.values())

    def close(self) -> None:
        for name, process in self._processes.items():
            if name == "database":
                process.send_signal(signal.SIGQUIT)  # its processes have sessions of their own, which it ends
            else:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._temporary.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
