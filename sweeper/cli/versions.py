"""What --version prints."""

from __future__ import annotations

import platform

import sweeper
from workloads.api.host import version_of

PACKAGES = ("torch", "ray", "optuna", "mlflow", "hydra-core")


def describe_versions() -> str:
    """Return the versions of sweeper, Python and the main packages. Imports none of them."""
    versions = {"Python": platform.python_version(), **{name: version_of(name) for name in PACKAGES}}
    others = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    return f"sweeper {sweeper.__version__}\n{others}"
