"""Record a sweep and its provenance in MLflow from a separate process."""
