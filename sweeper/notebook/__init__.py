"""Sweeps from Python: what `import sweeper` offers in addition to the commands."""
