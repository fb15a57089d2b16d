"""Models: their sizes, by name or from a config.json, and their FLOPs. Standard library only."""
