"""One driver for each sweep: a lock on its folder."""

from __future__ import annotations

import fcntl
import os
import sys
import time
from pathlib import Path
from typing import IO

from sweeper.common.errors import UserInputError

PATIENCE_S = 20.0


def take(folder: Path) -> IO[str]:
    """The sweep's folder, with its lock held until this process and its recording process have ended."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)  # parameters and programs' last words are the user's own
        lock = (folder / "lock").open("a+")
    except OSError as error:
        raise UserInputError(f"dir={folder.parent.parent}: cannot be written ({error.strerror})") from error
    deadline, told = time.monotonic() + PATIENCE_S, False
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            lock.seek(0)
            holder = f"name={folder.name}: this sweep is being run by process {lock.read().strip() or 'unknown'}"
            if time.monotonic() > deadline:
                raise UserInputError(holder) from None
            # A driver that was killed leaves its recording process to end what it is at: most often at once.
            if not told and time.monotonic() > deadline - PATIENCE_S + 1:
                print(f"{holder}; waiting {PATIENCE_S:g} s for its end", file=sys.stderr, flush=True)
                told = True
            time.sleep(0.1)
    lock.truncate(0)
    lock.write(f"{os.getpid()}\n")
    lock.flush()
    return lock
