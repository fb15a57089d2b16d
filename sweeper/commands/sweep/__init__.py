"""Run a sweep, from its checked plan to its results."""
