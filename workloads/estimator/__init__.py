"""Estimate any trainer's step time and memory. Never reports estimates as measurements. Standard library only."""
