"""Recording a sweep in MLflow from a process of its own, with its provenance."""
