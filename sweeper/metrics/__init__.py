"""Derive, rank and compare metrics."""
