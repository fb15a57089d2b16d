"""Measure the time that each phase of a command takes, beginning at process start."""

import os
import time
from pathlib import Path

SECONDS_PER_HOUR, SECONDS_PER_DAY = 3600, 86400


def process_age_s() -> float:
    """Return the number of seconds since this process started, including imports, or 0 if /proc is missing."""
    try:
        # The 20th field after the name is the start time in ticks since boot (proc(5)). The name may contain spaces.
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0.0
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))


class PhaseClock:
    """A clock that sums the time spent in each phase of a command, beginning at process start in the phase `start`."""

    def __init__(self) -> None:
        self._started_s = self._entered_s = time.monotonic() - process_age_s()
        self._phase = "start"
        self._seconds: dict[str, float] = {}

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._started_s

    def enter(self, phase: str) -> None:
        """Begin a phase, unless this phase is already active."""
        if phase != self._phase:
            self._seconds = self.seconds()
            self._phase, self._entered_s = phase, time.monotonic()

    def seconds(self) -> dict[str, float]:
        """Return the seconds that each phase has taken so far, in phase order."""
        present_s = time.monotonic() - self._entered_s
        return {**self._seconds, self._phase: self._seconds.get(self._phase, 0.0) + present_s}
