"""Parse the command line: Hydra overrides, multirun, and the arguments of subcommands."""
