"""Run a sweep of a packed Python function: `sweeper function FILE`."""
