"""Define how commands end: exit codes, error messages, and the handling of SIGINT and SIGTERM in a sweep."""

import io
import os
import pwd
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from sweeper.common.format import printable
from workloads.api.errors import UserInputError

# docs/reference/exit-codes.md lists these meanings.
COMPLETE = 0  # complete; for commands that return a verdict: pass
SOME_FAILED = 1  # trials failed, no trial is within the limits, or the sweep ended early; as a verdict: fail
INVALID_INPUT = 2  # the input is invalid, a file cannot be read or written, or there is nothing to compare
NO_VERDICT = 3  # the evidence for a verdict is inconclusive
INTERRUPTED = 130  # Ctrl-C or SIGTERM ended the command; the same command resumes a sweep
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # SIGHUP is sent when a terminal closes


def open_streams() -> None:
    """Reopen closed standard streams, so that no other file gets their descriptors. Escape unencodable characters."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))  # gets the lowest free descriptor
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def name_user() -> None:
    """Set HOME and USER if the password database has no entry for the user, because libraries need both."""
    try:
        pwd.getpwuid(os.getuid())
    except KeyError:
        os.environ.setdefault("HOME", "/")
        os.environ.setdefault("USER", str(os.getuid()))


def exit_with(command: Callable[[], int], program: str = "sweeper") -> NoReturn:
    """Run a command and exit with the returned code or an error code. `program` is the prefix of error messages."""
    try:
        code = command()
    except UserInputError as error:
        code = fail(str(error), INVALID_INPUT, program)
    except BrokenPipeError:  # `| head` has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = COMPLETE
    except OSError as error:
        if error.filename is None:
            raise
        code = fail(f"{error.filename}: {error.strerror}", INVALID_INPUT, program)
    except KeyboardInterrupt:
        before = " before anything was started" if program == "sweeper" else ""
        code = fail(f"interrupted{before}", INTERRUPTED, program)
    sys.exit(code)


def fail(message: str, code: int, program: str = "sweeper") -> int:
    print(f"{program}: {printable(message)}", file=sys.stderr)
    return code


def interpreter() -> str:
    """Return the command that starts this Python interpreter from the working directory."""
    interpreter = Path(sys.executable)
    below = interpreter.is_relative_to(Path.cwd())
    return str(interpreter.relative_to(Path.cwd())) if below else interpreter.name


def signals_to_handle() -> list[signal.Signals]:
    """Return SIGNALS, excluding SIGHUP if nohup started this process."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [signum for signum in SIGNALS if signum != signal.SIGHUP or not ignored]


class StopRequests:
    """A counter of requests to stop. `command`, which resumes the sweep, is printed if the process exits at once."""

    def __init__(self, command: str) -> None:
        self._command = command
        self._count = 0
        self._previous = [signal.getsignal(signum) for signum in SIGNALS]
        self.leave_at_once = False  # set when no running trials are left to wait for

    @property
    def requested(self) -> bool:
        return self._count > 0

    def install(self) -> None:
        """Install the signal handlers. This is called again after Ray has installed its own handlers."""
        for signum in signals_to_handle():
            signal.signal(signum, self._handle)

    def restore(self) -> None:
        """Restore the earlier handlers, because another sweep may follow in this process."""
        for signum, handler in zip(SIGNALS, self._previous, strict=True):
            signal.signal(signum, handler)

    def add(self) -> None:
        """Count a request that did not arrive as a signal: during startup, Ray raises SystemExit on SIGTERM."""
        self._count += 1

    def _handle(self, signum: int, _: object) -> None:
        if signum == signal.SIGHUP and self.requested:
            return  # the shell and the kernel each send a SIGHUP when a terminal closes
        self.add()
        for number in (1, 2) if signum == signal.SIGHUP else ():
            try:
                os.write(number, b"")
            except OSError:  # the terminal is closed, so discard further output
                os.dup2(os.open(os.devnull, os.O_WRONLY), number)
        if self._count > 1 or self.leave_at_once:
            self.leave("left at once", INTERRUPTED)

    def leave(self, reason: str, code: int) -> None:
        """End the process from any thread. Cleanup is left to the next start of the sweep."""
        show_cursor = "\x1b[?25h" if sys.stderr.isatty() else ""  # the live display hides the cursor
        os.write(2, f"{show_cursor}\n{reason}; to resume:\n  {self._command}\n".encode())
        os._exit(code)
