"""The commands, each in its own package."""
