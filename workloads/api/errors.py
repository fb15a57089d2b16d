"""Errors that a user can act on."""


class UserInputError(Exception):
    """Invalid input. Users see only the message, which names the key and the allowed values. The exit code is 2."""


def describe_os_error(error: OSError) -> str:
    """Return a system error's reason and file."""
    return f"{error.strerror or error}{f' ({error.filename})' if error.filename else ''}"


def message_of(error: BaseException) -> str:
    """Return an error's message; empty if the error has none or cannot return it."""
    try:
        return str(error).strip()
    except Exception:  # raised by the error's own __str__
        return ""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the error's type if there is no message."""
    return (message_of(error).splitlines() or [type(error).__name__])[0]
