"""Files, formats, clocks and trial records, which every other package uses."""
