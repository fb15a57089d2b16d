"""Run sweeps from Python: the functions that `import sweeper` offers in addition to the commands."""
