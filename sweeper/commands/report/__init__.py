"""Build tables, charts and comparisons of the sweeps in an MLflow store."""
