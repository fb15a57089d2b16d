"""Run the entry function of a command for many random cases, in forked batches without a network.

A case fails if it raises, if its exit code is not documented, if it prints a traceback, if it takes more than 10 s of
CPU time or 120 s, or if it writes, renames or removes a file outside of its folder. Children have a network namespace
with nothing but loopback and at most 6 GiB of address space.
"""

import ctypes
import json
import os
import resource
import select
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from tests.conftest import environment
from tests.support.fuzzing import Case, sample_path

CPU_LIMIT_S = 10.0
WALL_LIMIT_S = 120.0  # of a case that waits; other processes may hold the cores
MEMORY_LIMIT_BYTES = 6 << 30
BATCH = 50
CLONE_NEWNET, CLONE_NEWUSER = 0x40000000, 0x10000000
# Audit events whose first arguments are paths that change.
CHANGES = {
    "os.mkdir": 1,
    "os.remove": 1,
    "os.rmdir": 1,
    "os.rename": 2,
    "os.link": 2,
    "os.symlink": 2,
    "os.truncate": 1,
}
CHANGES |= {"os.chmod": 1, "os.chown": 1, "sqlite3.connect": 1}


@dataclass(frozen=True)
class Failure:
    """What is wrong with a case."""

    case: Case
    reason: str


class TooLong(BaseException):
    """A case has used its CPU time."""


def isolate_network() -> str:
    """Give this process a network namespace with loopback only. Returns why that is impossible, or an empty string."""
    flags = CLONE_NEWNET if os.geteuid() == 0 else CLONE_NEWNET | CLONE_NEWUSER
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(flags):
        return os.strerror(ctypes.get_errno())
    subprocess.run(["ip", "link", "set", "lo", "up"], check=False, capture_output=True)
    return ""


def plan_entry() -> Callable[[], None]:
    """Return the entry function of the console command, with what a plan imports, and without the start of a sweep."""
    import optuna  # noqa: F401
    import ray  # noqa: F401

    from sweeper.__main__ import main
    from sweeper.commands.sweep.loop import Sweep

    def plan() -> None:
        Sweep.run = lambda self: 0  # in a forked child; a flag may have taken plan=true for its value
        main()

    return plan


def import_entry() -> Callable[[], None]:
    """Return the entry function of `python -m sweeper ingest`."""
    from sweeper.commands.ingest.main import main

    return lambda: main(sys.argv[1:])


def run_processes(cases: Sequence[Case], folder: Path) -> list[Failure]:
    """Run each case as a process of its own, in a network namespace. Returns the failures."""
    failures = []
    for number, case in enumerate(cases):
        place = folder / f"process{number}"
        place.mkdir(parents=True)
        sample_path(case, place)
        (folder / "home").mkdir(exist_ok=True)
        before = {path for path in folder.rglob("*") if place not in path.parents}
        reason = _run_process(case, place)
        if not reason and (made := {path for path in folder.rglob("*") if place not in path.parents} - before):
            reason = f"writes outside of its folder: {sorted(map(str, made))[:5]}"
        failures += [Failure(case, reason)] if reason else []
        shutil.rmtree(place, ignore_errors=True)
    return failures


def _run_process(case: Case, place: Path) -> str:
    """Return what is wrong with a case that runs as a process, empty if nothing is."""
    command = ["unshare", *(["--net"] if os.geteuid() == 0 else ["--net", "--map-root-user"]), "--"]
    command += [sys.executable, "-m", "sweeper", *case.words]
    started_s = resource.getrusage(resource.RUSAGE_CHILDREN)
    try:
        result = subprocess.run(
            command,
            cwd=place,
            env=environment(HOME=str(place.parent / "home")),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=WALL_LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        return f"hangs: no end after {WALL_LIMIT_S:.0f} s"
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = used.ru_utime + used.ru_stime - started_s.ru_utime - started_s.ru_stime
    if "Traceback (most recent call last)" in result.stdout + result.stderr:
        return f"prints a traceback: {result.stderr[-2000:]}"
    if result.returncode not in (0, 2):
        return f"exit code {result.returncode}: {result.stderr[-600:]}"
    return f"takes {cpu_s:.1f} s of CPU time" if cpu_s > CPU_LIMIT_S else ""


def run_cases(
    entry: Callable[[], None], name: str, cases: Sequence[Case], folder: Path, codes: Sequence[int] = (0, 2)
) -> list[Failure]:
    """Run each case in a folder of its own below `folder`. Returns the failures."""
    failures: list[Failure] = []
    remaining = list(enumerate(cases))
    while remaining:
        batch, remaining = remaining[:BATCH], remaining[BATCH:]
        done = 0
        for reason in _run_batch(entry, name, [case for _, case in batch], folder, codes):
            if reason:
                failures.append(Failure(batch[done][1], reason))
            done += 1
        if done < len(batch):  # the child has ended or hangs
            remaining = batch[done:] + remaining
    return failures


def _run_batch(
    entry: Callable[[], None], name: str, cases: Sequence[Case], folder: Path, codes: Sequence[int]
) -> Iterator[str]:
    """Yield the reason of each case, empty for a good one. The last one is a case that ended or stopped the child."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        _run_in_child(entry, name, cases, folder, codes, writer)
    os.close(writer)
    try:
        with open(reader, "rb", buffering=0) as results:
            for _ in cases:
                ready, _, _ = select.select([results], [], [], WALL_LIMIT_S)
                if not ready:
                    yield f"hangs: no end after {WALL_LIMIT_S:.0f} s"
                    return
                line = _read_line(results)
                if not line:
                    _, status = os.waitpid(pid, 0)
                    pid = 0
                    yield f"ended its process with status {os.waitstatus_to_exitcode(status)}"
                    return
                yield str(json.loads(line))
    finally:
        if pid:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _read_line(stream: Any) -> bytes:
    line = b""
    while (byte := stream.read(1)) and byte != b"\n":
        line += byte
    return line


def _run_in_child(
    entry: Callable[[], None], name: str, cases: Sequence[Case], folder: Path, codes: Sequence[int], writer: int
) -> NoReturn:
    os.setsid()
    isolate_network()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    signal.signal(signal.SIGPROF, _raise_too_long)
    changes: list[str] = []
    sys.addaudithook(lambda event, args: _note_change(changes, event, args))
    variables = dict(os.environ) | {"HOME": str(folder / "home"), "TMPDIR": str(folder / "tmp"), "COLUMNS": "100"}
    for number, case in enumerate(cases):
        os.environ.clear()
        os.environ.update(variables)
        place = folder / f"case{number}"
        for path in (place, folder / "home", folder / "tmp"):
            path.mkdir(parents=True, exist_ok=True)
        sample_path(case, place)
        os.chdir(place)
        sys.argv = [name, *case.words]
        reason = _run_case(entry, codes, place, changes)
        os.chdir(folder)
        shutil.rmtree(place, ignore_errors=True)
        os.write(writer, json.dumps(reason).encode() + b"\n")
    os._exit(0)


def _run_case(entry: Callable[[], None], codes: Sequence[int], place: Path, changes: list[str]) -> str:
    from hydra.core.global_hydra import GlobalHydra

    GlobalHydra.instance().clear()
    changes.clear()
    output = place.with_suffix(".out")
    with output.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout, sys.stderr = (os.fdopen(os.dup(descriptor), "w") for descriptor in (1, 2))  # pytest has its own
    reason, started = "", time.process_time()
    try:
        signal.setitimer(signal.ITIMER_PROF, CPU_LIMIT_S)
        entry()
        reason = "returned instead of exiting"
    except SystemExit as error:
        code = error.code or 0
        reason = "" if code in codes else f"exit code {code}"
    except TooLong:
        reason = f"takes more than {CPU_LIMIT_S:.0f} s of CPU time: {traceback.format_exc()[-1500:]}"
    except BaseException:
        reason = f"raises: {traceback.format_exc()[-2500:]}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.flush()
        sys.stderr.flush()
    text = output.read_bytes()
    outside = [path for path in changes if not Path(path).resolve().is_relative_to(place.parent)]
    if not reason and b"Traceback (most recent call last)" in text:
        reason = f"prints a traceback: {text[-2000:].decode(errors='replace')}"
    if not reason and outside:
        reason = f"writes outside of its folder: {', '.join(outside[:5])}"
    if reason and not reason.startswith("raises"):
        reason += f" [{time.process_time() - started:.1f} s]\n{text[-600:].decode(errors='replace')}"
    return reason


def _raise_too_long(*_: object) -> NoReturn:
    raise TooLong


def _note_change(changes: list[str], event: str, args: tuple[Any, ...]) -> None:
    """Record the paths that an operation changes, but devices."""
    if event == "open":
        path, mode, flags = args
        is_write = bool((flags or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)) if mode is None or flags else False
        paths = [path] if is_write and isinstance(path, (str, bytes, os.PathLike)) else []
    else:
        paths = list(args[: CHANGES.get(event, 0)])
    for path in paths:
        text = str(Path(os.fsdecode(path)).absolute()) if isinstance(path, (str, bytes, os.PathLike)) else ""
        if text and not text.startswith(("/dev/", "/proc/self/")):
            changes.append(text)
