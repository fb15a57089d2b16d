"""Errors, trial records, metrics and secrets, which every other package uses."""
