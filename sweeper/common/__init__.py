"""Files, formats, clocks and trial records that every other package uses."""
