"""Load the notes that appear below the report's tables and charts from notes.toml, by name."""

from workloads.tables import read_toml

NOTES: dict[str, str] = read_toml(__file__, "notes.toml")
