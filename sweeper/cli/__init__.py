"""The command line: Hydra overrides, multirun, and the argument parser of the subcommands."""
