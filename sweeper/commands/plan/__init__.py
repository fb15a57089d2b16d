"""Estimate the fastest layouts of a training run; no cluster is needed: `python -m sweeper plan`."""
