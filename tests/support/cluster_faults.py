"""Faults of a cluster's nodes and network. `faulty_sweep.py` has a sweep under them."""

import os
import random
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from tests.support.virtual_cluster import Cluster
from tests.support.virtual_mlflow import start_mlflow, uri_of

WORKERS = ("first", "second")
DRIVER, STORE = "driver", "store"
SLOW_KBIT_S = 256
# Wall clocks of a program an hour ahead, its other clocks left as they are. libfaketime 0.9.10 cannot do that to Python
# 3.11, whose `time.sleep` then fails with EINVAL.
HOUR_AHEAD = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/time.h>
#include <time.h>
int clock_gettime(clockid_t id, struct timespec *t) {
  int (*real)(clockid_t, struct timespec *) = dlsym(RTLD_NEXT, "clock_gettime");
  int code = real(id, t);
  if (!code && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) t->tv_sec += 3600;
  return code;
}
time_t time(time_t *t) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (t) *t = now.tv_sec;
  return now.tv_sec;
}
int gettimeofday(struct timeval *t, void *zone) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  t->tv_sec = now.tv_sec;
  t->tv_usec = now.tv_nsec / 1000;
  return 0;
}
"""


class World:
    """A cluster that faults act on.

    Args:
        is_whole: the driver and MLflow's server have nodes of their own; otherwise the driver runs on the head and
            writes its results to a file, which takes half the time.
    """

    def __init__(self, folder: Path, is_whole: bool = True) -> None:
        self.driver = DRIVER if is_whole else "head"
        self.cluster = Cluster(folder, WORKERS, *([DRIVER], [STORE]) if is_whole else ())
        self.network, self.uri = self.cluster.network, ""
        self.store: str | None = None
        if is_whole:
            self.server = start_mlflow(self.network.nodes[STORE], folder)
            self.uri, self.store = uri_of(self.network.nodes[STORE]), f"sqlite:///{folder}/server.db"

    def close(self) -> None:
        self.cluster.close()


@contextmanager
def cut_link(node: str, world: World) -> Iterator[None]:
    world.network.disconnect(node)
    yield
    world.network.connect(node)


@contextmanager
def block_to_head(node: str, world: World) -> Iterator[None]:
    world.network.block(node, "head")
    yield
    world.network.unblock(node, "head")


@contextmanager
def block_from_driver(node: str, world: World) -> Iterator[None]:
    world.network.block(world.driver, node)
    yield
    world.network.unblock(world.driver, node)


@contextmanager
def slow_link(node: str, world: World) -> Iterator[None]:
    world.network.limit_rate(node, SLOW_KBIT_S)
    yield
    world.network.lift_rate(node)


@contextmanager
def kill_node(node: str, world: World) -> Iterator[None]:
    world.network.nodes[node].kill()
    yield
    world.cluster.restore(node)


@contextmanager
def lose_node(node: str, world: World) -> Iterator[None]:
    world.network.nodes[node].kill()
    yield


@contextmanager
def stop_workers(node: str, world: World) -> Iterator[None]:
    """Stop the processes that run trials; the node's Ray goes on answering."""
    pids = world.network.nodes[node].pids_of("ray::Worker")
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    yield
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


@contextmanager
def fill_tmp(node: str, world: World) -> Iterator[None]:
    world.network.nodes[node].run("dd", "if=/dev/zero", "of=/tmp/filling", "bs=1M")
    yield
    world.network.nodes[node].run("rm", "/tmp/filling")


@contextmanager
def shift_clock(node: str, world: World) -> Iterator[None]:
    """Let a node come back with a wall clock that is an hour ahead. Needs a compiler."""
    library = world.cluster.folder / "hour_ahead.so"
    command = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library), "-ldl"]
    subprocess.run(command, input=HOUR_AHEAD, text=True, check=True)
    world.network.nodes[node].kill()
    world.network.add(node)
    world.cluster.start_worker(node, LD_PRELOAD=str(library))
    yield
    world.network.nodes[node].kill()
    world.cluster.restore(node)


@contextmanager
def restart_store(_: str, world: World) -> Iterator[None]:
    for pid in world.network.nodes[STORE].pids():  # the server and its worker, which would keep the port
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    world.server.wait()
    yield
    world.server = start_mlflow(world.network.nodes[STORE], world.cluster.folder)


@dataclass(frozen=True)
class Fault:
    """One kind of fault: what is done to a node while it lasts, and for how long."""

    apply: Callable[[str, World], AbstractContextManager[None]]
    duration_s: float
    node: str = WORKERS[0]


FAULTS = {
    **{f"link of a worker down, {s} s": Fault(cut_link, s) for s in (5, 30, 120)},
    **{f"link of the driver down, {s} s": Fault(cut_link, s, DRIVER) for s in (5, 30, 120)},
    **{f"link of the head down, {s} s": Fault(cut_link, s, "head") for s in (5, 30, 120)},
    "from a worker to the head nothing arrives, 30 s": Fault(block_to_head, 30),
    "from the driver to a worker nothing arrives, 30 s": Fault(block_from_driver, 30),
    f"a worker receives {SLOW_KBIT_S} kbit/s, 60 s": Fault(slow_link, 60),
    "a node killed, back after 10 s": Fault(kill_node, 10),
    "a node answers and runs nothing, 60 s": Fault(stop_workers, 60),
    "a node comes back with its clock an hour ahead, for 20 s": Fault(shift_clock, 20),
    "/tmp of a node full, 30 s": Fault(fill_tmp, 30),
    "the store restarted after 20 s": Fault(restart_store, 20, STORE),
}


def draw_faults(rng: random.Random, kind: str = "") -> Iterator[Fault]:
    """Draw faults without end, of the kinds whose names contain `kind`. A worker's fault hits one of them at random."""
    kinds = [fault for name, fault in FAULTS.items() if kind in name]
    while True:
        fault = rng.choice(kinds)
        yield replace(fault, node=rng.choice(WORKERS)) if fault.node in WORKERS else fault
