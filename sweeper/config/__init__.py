"""The configuration: its schema, how it is resolved, the search space and the hardware catalogue."""
