"""Estimate the fastest layouts of a training run without a cluster: `python -m sweeper plan`."""
