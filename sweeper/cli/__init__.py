"""The command lines: Hydra overrides, multirun and the argument parser of the subcommands."""
