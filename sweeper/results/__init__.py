"""A sweep's results: its folder, its runs in MLflow, and what may be compared."""
