"""Terminate a program and everything that it started, and any processes that a trial left behind.

    python processes.py MARK SESSION FOLDER  waits until its standard input ends, then terminates the marked processes
                                             and removes FOLDER, the program's output

A process is marked if its environment contains MARK. Children inherit the mark, even if they have their own session and
their parent has ended. A process in the program's session also counts as marked, whatever its environment contains.
This file is run by an interpreter without site packages, so it imports only the standard library.
"""

import ctypes
import gc
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

GRACE_S = 5.0  # between SIGTERM and SIGKILL
# A child that another thread starts can be matched to its `Popen` only after the `Popen` has the process id.
BEING_STARTED_S = 0.05
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h, since Linux 3.4
# Parts of the command lines of processes that serve this process until it ends: a program's guard, which ends by
# itself, and helpers of `multiprocessing` and joblib, which no object refers to.
SERVING = (__file__, "resource_tracker", "forkserver")


def terminate(find: Callable[[], set[int]]) -> None:
    """Terminate the processes that `find` returns until it returns none: SIGTERM first, SIGKILL after GRACE_S."""
    for signum in (signal.SIGTERM, signal.SIGKILL):
        signalled = set[int]()
        deadline = time.monotonic() + GRACE_S
        while time.monotonic() < deadline:
            alive = find()
            if not alive:
                return
            for pid in alive - signalled:  # includes processes started in the meantime
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signum)
            signalled |= alive
            time.sleep(0.05)


def find_marked(mark: str, session: int) -> set[int]:
    """Return the marked processes, except zombies."""
    pids = set()
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit():
                state, _, _, process_session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
                is_marked = int(process_session) == session or mark.encode() in (entry / "environ").read_bytes()
                if is_marked and state != "Z":
                    pids.add(int(entry.name))
    return pids


class Orphans:
    """The processes that trials leave behind, such as daemons: descendants of this process whose parent has ended.

    Orphans become children of this process, which makes itself a subreaper. A process can leave its session and process
    group and drop the mark, but cannot escape a subreaper. Children that an object in this process references are kept.
    """

    def __init__(self) -> None:
        with suppress(OSError, AttributeError):  # not Linux
            ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._kept = _children()

    def end(self) -> list[str]:
        """Terminate and reap processes left behind since the last call. Return the command lines of those that were
        still running."""
        left: dict[int, str] = {}

        def find() -> set[int]:
            if not (new := _children() - self._kept):
                return set()
            time.sleep(BEING_STARTED_S)
            gc.collect()
            dropped = {id(process) for process in getattr(subprocess, "_active", [])}  # processes without a `Popen`
            held = {process.pid or 0 for process in multiprocessing.active_children()} | {
                getattr(item, "pid", None) or 0
                for item in gc.get_objects()
                if issubclass(type(item), subprocess.Popen) and id(item) not in dropped
            }
            self._kept |= {pid for pid in new if pid in held or any(part in _command(pid) for part in SERVING)}
            for pid in new - self._kept:
                with suppress(ChildProcessError):
                    if not os.waitpid(pid, os.WNOHANG)[0]:
                        left.setdefault(pid, _command(pid))
            return new & left.keys() & _children()

        terminate(find)
        self._kept &= _children()  # process ids are reused
        return list(left.values())


def _children() -> set[int]:
    pids = set[int]()
    for file in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):  # the thread has ended
            pids.update(map(int, file.read_text().split()))
    return pids


def _command(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").replace("\0", " ").strip()
    return ""


if __name__ == "__main__":
    if os.fork():  # a worker is killed with its children, and this process must outlive the worker
        os._exit(0)
    os.setsid()
    sys.stdin.read()
    mark, session = sys.argv[1], int(sys.argv[2])
    terminate(lambda: find_marked(mark, session))
    shutil.rmtree(sys.argv[3], ignore_errors=True)
