"""A sweep's results: its folder, its runs in MLflow, and which of them may be compared."""
