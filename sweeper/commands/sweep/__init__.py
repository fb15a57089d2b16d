"""A sweep, from its checked plan to its results."""
