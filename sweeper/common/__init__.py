"""Provide helpers for files, formats, clocks and trial records, which all other packages use."""
