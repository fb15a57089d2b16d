"""The topologies in `conf/topology/`, and those in files of the user's own."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from sweeper.config.resolution import CONF
from workloads.api.errors import UserInputError, first_line, suggest
from workloads.estimator.cluster import Topology
from workloads.estimator.topologies import build_topology

AUTO = "auto"


@cache
def known_topologies() -> dict[str, Topology]:
    """Return every topology in `conf/topology/` by its name."""
    paths = sorted((CONF / "topology").glob("*.yaml"))
    return {path.stem: read_topology(path) for path in paths if path.stem != AUTO}


def find_topology(name: str) -> Topology:
    """Return the topology of a name, or of a YAML file with the same keys.

    Raises:
        UserInputError: there is none of that name, or the file is not valid.
    """
    if name.endswith((".yaml", ".yml")):
        return read_topology(Path(name).expanduser())
    if name not in known_topologies():
        raise UserInputError(
            f"unknown topology '{name}': must be a name or a YAML file. {suggest(name, known_topologies())}"
        )
    return known_topologies()[name]


def read_topology(path: Path) -> Topology:
    """Return the topology of a YAML file with the keys of `Topology`.

    Raises:
        UserInputError: the file cannot be read, or a key is missing or wrong.
    """
    try:
        values: Any = OmegaConf.to_container(OmegaConf.load(path))
    except OSError as error:
        raise UserInputError(f"topology {path} cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, YAMLError, OmegaConfBaseException) as error:
        mark = getattr(error, "problem_mark", None)
        place = f"line {mark.line + 1}: " if mark else ""
        raise UserInputError(f"topology {path} cannot be read: {place}{first_line(error)}") from error
    if not isinstance(values, dict):
        raise UserInputError(f"topology {path} has no keys")
    return topology_of({"name": path.stem, **{str(key): value for key, value in values.items()}})


def topology_of(values: dict[str, Any]) -> Topology:
    """Return the topology that values describe. Raises UserInputError where a key is missing or wrong."""
    try:
        return build_topology(values)
    except ValueError as error:
        raise UserInputError(str(error)) from error
