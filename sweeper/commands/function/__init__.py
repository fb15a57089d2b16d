"""`sweeper function FILE`: run a sweep of a packed Python function."""
