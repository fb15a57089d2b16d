"""Measure how many of this machine's cores other processes use, according to the counters in /proc."""

import os
import time
from contextlib import suppress
from pathlib import Path

WINDOW_S = 0.5
WINDOWS = 4  # number of windows; an intermittent load is low in at least one window
HELD = 0.5  # in cores; a lower load leaves enough undisturbed calls
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
KERNEL_THREAD = 0x00200000  # PF_KTHREAD in include/linux/sched.h


class CoreWatch:
    """A watch on core usage that starts when the object is created. The process can do other work in the meantime."""

    def __init__(self) -> None:
        self._first = _read()

    def find_use(self) -> tuple[float, str]:
        """Return how many cores other processes always use, and the busiest process. Return 0 early if idle."""
        least, (last_at_s, last_s, first) = float("inf"), self._first
        for _ in range(WINDOWS):
            time.sleep(max(0.0, last_at_s + WINDOW_S - time.monotonic()))
            at_s, others_s, processes = _read()
            least = min(least, (others_s - last_s) / (at_s - last_at_s))
            if least < HELD:
                return 0.0, ""
            last_at_s, last_s = at_s, others_s
        # The list is empty if other processes are hidden, for example in a container.
        return least, max(processes, key=lambda name: processes[name] - first.get(name, 0.0), default="")


def _read(proc: Path = Path("/proc")) -> tuple[float, float, dict[str, float]]:
    """Return the time, other processes' CPU seconds on this process's cores, and the CPU seconds of each process."""
    allowed, ticks, processes = {f"cpu{number}" for number in os.sched_getaffinity(0)}, 0, {}
    with suppress(OSError):
        for name, *counts in map(str.split, (proc / "stat").read_text().splitlines()):
            if name in allowed:
                user, nice, system, _, _, interrupts, soft_interrupts, *_ = map(int, counts)
                ticks += user + nice + system + interrupts + soft_interrupts
    for file in proc.glob("[0-9]*/stat"):
        with suppress(OSError):  # the process has ended
            start, _, fields = file.read_text().rpartition(")")
            if (pid := file.parent.name) != str(os.getpid()) and int(fields.split()[6]) & KERNEL_THREAD == 0:
                processes[f"{start.partition('(')[2]} (pid {pid})"] = sum(map(int, fields.split()[11:13])) / TICKS_PER_S
    return time.monotonic(), ticks / TICKS_PER_S - sum(os.times()[:4]), processes
