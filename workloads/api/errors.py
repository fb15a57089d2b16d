"""Errors that a user can act on."""


class UserInputError(Exception):
    """Invalid input. Only the message is shown: it names the key and the allowed values. The exit code is 2."""


def describe_os_error(error: OSError) -> str:
    """Return the reason for a system error and the file that it concerns."""
    return f"{error.strerror or error}{f' ({error.filename})' if error.filename else ''}"


def message_of(error: BaseException) -> str:
    """Return an error's message; empty if it has none, or none that it can return."""
    try:
        return str(error).strip()
    except Exception:  # raised by the error's own __str__
        return ""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type if it has none."""
    return (message_of(error).splitlines() or [type(error).__name__])[0]
