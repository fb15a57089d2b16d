"""`ray start` without the processes that a sweep does not use; they cost a node 3 s of CPU time, and 0.5 s a core."""

import sys

PROGRAM = """
import sys
from ray.scripts.scripts import main
from sweeper.execution.ray_internals import without_unused_processes
with without_unused_processes():
    sys.exit(main())
"""
# By default a node starts a Python process for each core when the first driver connects.
VARIABLES = {"RAY_prestart_worker_first_driver": "0"}


def command(*arguments: str) -> list[str]:
    """Return the command line of `ray start` with these arguments; it needs this checkout in PYTHONPATH."""
    return [sys.executable, "-c", PROGRAM, "start", *arguments]
