"""Estimates of training on clusters: step time and memory of a job, for any trainer. Standard library only.

Estimates are never reported as measurements.
"""
