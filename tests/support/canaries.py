"""A canary fails when a library has changed what it does not document, and says what to do."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version

import pytest


@contextmanager
def canary(package: str, use: str, remedy: str) -> Iterator[None]:
    """Fail with the use that a release of a package has changed and what to do about it."""
    try:
        yield
    except Exception as error:
        pytest.fail(
            f"{package} {version(package)} has changed {use} ({type(error).__name__}: {error}).\n{remedy}\n"
            f"Then set the versions of {package} in pyproject.toml to those that were tried.",
            pytrace=False,
        )
