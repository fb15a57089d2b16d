"""`python -m sweeper plan`: the fastest layouts of a training on a cluster, estimated without one."""
