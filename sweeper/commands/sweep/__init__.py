"""Run a sweep, from the checked plan to the results."""
