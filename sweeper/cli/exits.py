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


def exit_with(command: Callable[[], int]) -> NoReturn:
    """Exit with the code that a command returns, or that its error stands for."""
    try:
        code = command()
    except UserInputError as error:
        code = fail(str(error), INVALID_INPUT)
    except BrokenPipeError:  # `| head` has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = COMPLETE
    except KeyboardInterrupt:
        code = fail("interrupted before anything was started", INTERRUPTED)
    sys.exit(code)


def fail(message: str, code: int) -> int:
    print(f"sweeper: {printable(message)}", file=sys.stderr)
    return code


def interpreter() -> str:
    """Return the interpreter as a person would type it here."""
    interpreter = Path(sys.executable)
    below = interpreter.is_relative_to(Path.cwd())
    return str(interpreter.relative_to(Path.cwd())) if below else interpreter.name
