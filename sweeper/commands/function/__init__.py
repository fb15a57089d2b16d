"""`sweeper function FILE`: a sweep of a packed Python function."""
