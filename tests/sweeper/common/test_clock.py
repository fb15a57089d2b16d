"""The time that a command takes, by phase."""

import os
import subprocess
import sys
import time

import pytest

from sweeper.common.clock import PhaseClock
from tests.conftest import environment


def test_the_age_of_a_process_counts_from_its_start() -> None:
    code = "import time; time.sleep(0.3); from sweeper.common.clock import process_age_s; print(process_age_s())"
    started_s = time.monotonic()
    child = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True)
    tick_s = 1 / os.sysconf("SC_CLK_TCK")  # the kernel rounds the start of a process down to one
    assert 0.3 <= float(child.stdout) <= time.monotonic() - started_s + tick_s


def test_the_phases_of_a_clock_add_up_to_its_time() -> None:
    clock = PhaseClock()
    for phase in ("trials", "trials", "finals", "trials", "report"):
        time.sleep(0.01)
        clock.enter(phase)
    seconds = clock.seconds()
    assert list(seconds) == ["start", "trials", "finals", "report"]
    assert seconds["trials"] >= 0.03 and seconds["start"] > 0.1  # the process is older than the clock
    assert sum(seconds.values()) == pytest.approx(clock.elapsed_s, abs=0.01)
