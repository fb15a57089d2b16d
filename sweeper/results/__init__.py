"""Read a sweep's results from its folder or MLflow, rank comparable results and compare runs."""
