"""Watch a cluster's head, and react if it does not respond for too long."""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator

from workloads.api.errors import UserInputError

# How long each Ray process waits for the head before it exits. KubeRay sets 600 s for workers of a cluster with GCS
# fault tolerance (ray-operator/controllers/ray/utils/constant.go).
LIMIT_VARIABLE = "RAY_gcs_rpc_server_reconnect_timeout_s"
LIMIT_S = 60.0  # Ray's default (src/ray/common/ray_config_def.h)
PROBE_INTERVAL_S = 2.0
PROBE_TIMEOUT_S = 2.0
# Ray would end this process without a message, so the sweep ends earlier. A probe and a pause take up to 4 s.
LEAD_S = 5.0


def read_timeout_s() -> float:
    """Return the sweep's timeout for the head, slightly below Ray's. Raises UserInputError if the limit is invalid."""
    text = os.environ.get(LIMIT_VARIABLE, "")
    try:
        limit_s = float(text or LIMIT_S)
    except ValueError:
        raise UserInputError(f"{LIMIT_VARIABLE}={text}: expected a number of seconds") from None
    return max(limit_s - LEAD_S, limit_s / 2)


class HeadWatch(threading.Thread):
    """Watches the head at one address, in a thread because Ray's calls block while the head is down."""

    def __init__(self, address: str) -> None:
        super().__init__(daemon=True)
        self._address = address
        host, _, port = address.rpartition(":")
        self._endpoint = (host.strip("[]"), int(port))
        self._timeout_s = read_timeout_s()
        self.stopped = threading.Event()
        self.start()

    def answers(self) -> bool:
        """Return whether the head accepts a connection now."""
        try:
            socket.create_connection(self._endpoint, timeout=PROBE_TIMEOUT_S).close()
        except OSError:
            return False
        return True

    def run(self) -> None:
        answered_s = time.monotonic()
        while not self.stopped.wait(PROBE_INTERVAL_S):
            if self.answers():
                answered_s = time.monotonic()
            elif time.monotonic() - answered_s > self._timeout_s:
                return _callbacks[-1](self._address)


def _exit_before_start(address: str) -> None:
    os.write(2, f"sweeper: the cluster's head {address} no longer responds; nothing was started\n".encode())
    os._exit(1)


_callbacks: list[Callable[[str], None]] = [_exit_before_start]
_current: HeadWatch | None = None


def watch(address: str | None) -> None:
    """Watch only the head at `address`. When it stops responding, call the latest `on_head_lost` callback."""
    global _current
    if _current:
        _current.stopped.set()
    _current = HeadWatch(address) if address else None


def is_away() -> bool:
    """Return whether the watched head currently fails to respond. Ray calls that need the head would then block."""
    return _current is not None and not _current.answers()


@contextlib.contextmanager
def on_head_lost(callback: Callable[[str], None]) -> Iterator[None]:
    """Within the context, call `callback` with the head's address if the connected cluster's head stops responding."""
    _callbacks.append(callback)
    try:
        yield
    finally:
        _callbacks.pop()
