"""Read the tables of a module, which are files in its folder."""

import csv
import tomllib
from pathlib import Path
from typing import Any


def read_toml(module: str, name: str) -> dict[str, Any]:
    """Return the content of the TOML file `name` in the folder of `module`, the `__file__` of the caller."""
    return tomllib.loads((Path(module).parent / name).read_text())


def read_csv(module: str, name: str) -> list[dict[str, str]]:
    """Return the rows of the CSV file `name` in the folder of `module`, the `__file__` of the caller."""
    return list(csv.DictReader((Path(module).parent / name).read_text().splitlines()))
