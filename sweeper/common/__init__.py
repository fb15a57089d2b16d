"""Provide files, formats, clocks and trial records to all other packages."""
