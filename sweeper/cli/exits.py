"""How every command ends: its exit code, and the line of an error."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from sweeper.common.exit_codes import COMPLETE, INTERRUPTED, INVALID_INPUT
from sweeper.common.format import printable
from workloads.api.errors import UserInputError


def exit_with(command: Callable[[], int], program: str = "sweeper") -> NoReturn:
    """Exit with the code that a command returns, or that its error stands for. `program` begins its messages."""
    try:
        code = command()
    except UserInputError as error:
        code = fail(str(error), INVALID_INPUT, program)
    except BrokenPipeError:  # `| head` has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = COMPLETE
    except KeyboardInterrupt:
        before = " before anything was started" if program == "sweeper" else ""
        code = fail(f"interrupted{before}", INTERRUPTED, program)
    sys.exit(code)


def fail(message: str, code: int, program: str = "sweeper") -> int:
    print(f"{program}: {printable(message)}", file=sys.stderr)
    return code


def interpreter() -> str:
    """Return the interpreter as a person would type it here."""
    interpreter = Path(sys.executable)
    below = interpreter.is_relative_to(Path.cwd())
    return str(interpreter.relative_to(Path.cwd())) if below else interpreter.name
