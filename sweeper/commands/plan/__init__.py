"""`python -m sweeper plan`: estimate the fastest layouts of a training run without a cluster."""
