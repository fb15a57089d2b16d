"""Metrics: what they are, how they are derived, ranked and compared."""
