"""The commands: a package for each."""
