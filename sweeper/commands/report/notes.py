"""The notes below the report's tables and charts, by their names in notes.toml."""

import tomllib
from pathlib import Path

NOTES: dict[str, str] = tomllib.loads(Path(__file__).with_name("notes.toml").read_text())
