"""Models: sizes, by name or from a config.json, and FLOPs. Uses only the standard library."""
