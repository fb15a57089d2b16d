"""Sweeps from Python: what `import sweeper` offers beside the commands."""
