"""A sweep's folder, as other processes than its driver read it: what it measures, its state and its trials."""
