"""The lock on a sweep's folder, which allows only one driver for each sweep."""

import fcntl
import os
import sys
import time
from pathlib import Path
from typing import IO

from workloads.api.errors import UserInputError

LOCK_TIMEOUT_S = 20.0
QUIET_WAIT_S = 1.0  # before a message reports the wait for the lock


def acquire(folder: Path) -> IO[str]:
    """Create the sweep's folder and lock it until both this process and its recording process end.

    Raises UserInputError if the folder cannot be written, or another process still runs the sweep after LOCK_TIMEOUT_S.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)  # parameters and program output are private to the user
        lock = (folder / "lock").open("a+")
    except OSError as error:
        raise UserInputError(f"dir={folder.parent.parent}: cannot be written ({error.strerror})") from error
    started_s, reported = time.monotonic(), False
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            lock.seek(0)
            holder = f"name={folder.name}: process {lock.read().strip() or 'unknown'} is running this sweep"
            waited_s = time.monotonic() - started_s
            if waited_s > LOCK_TIMEOUT_S:
                raise UserInputError(f"{holder}; stop it, or set another name=") from None
            # The recording process of a killed driver finishes its current write, mostly within a second.
            if not reported and waited_s > QUIET_WAIT_S:
                print(f"{holder}; waiting up to {LOCK_TIMEOUT_S:g} s for it to end", file=sys.stderr, flush=True)
                reported = True
            time.sleep(0.1)
    lock.truncate(0)
    lock.write(f"{os.getpid()}\n")
    lock.flush()
    return lock
