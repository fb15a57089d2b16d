"""Estimates of step time and memory for any trainer, never reported as measurements. Standard library only."""
