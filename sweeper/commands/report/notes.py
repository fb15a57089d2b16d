"""Load the notes that appear below the report's tables and charts from notes.toml, by name."""

import tomllib
from pathlib import Path

NOTES: dict[str, str] = tomllib.loads(Path(__file__).with_name("notes.toml").read_text())
