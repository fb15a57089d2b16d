"""Estimate any trainer's step time and memory. Estimates are never reported as measurements. Standard library only."""
