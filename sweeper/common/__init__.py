"""Errors, trial records and metrics, which every other package uses."""
