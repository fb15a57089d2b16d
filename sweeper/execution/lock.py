"""Lock a sweep's folder, so each sweep has at most one driver."""

import fcntl
import os
import time
from pathlib import Path
from typing import IO

from workloads.api.errors import UserInputError
from workloads.api.notices import notify

LOCK_TIMEOUT_S = 20.0
QUIET_WAIT_S = 1.0  # how long to wait for the lock before printing a message


def acquire(folder: Path) -> IO[str]:
    """Create the sweep's folder and lock it until this process and its recording process have both ended.

    Raises UserInputError if the folder is not writable, or if another process holds the lock for LOCK_TIMEOUT_S.
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
            # After a driver is killed, its recording process finishes the current write, usually within a second.
            if not reported and waited_s > QUIET_WAIT_S:
                notify(f"{holder}; waiting up to {LOCK_TIMEOUT_S:g} s for it to end")
                reported = True
            time.sleep(0.1)
    lock.truncate(0)
    lock.write(f"{os.getpid()}\n")
    lock.flush()
    return lock
