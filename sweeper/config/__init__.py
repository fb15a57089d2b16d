"""The configuration: its schema and resolution, the search space and the hardware catalog."""
