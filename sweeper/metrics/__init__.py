"""Metrics: how they are derived, ranked and compared."""
