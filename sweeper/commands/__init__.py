"""The subcommands of `sweeper`, one package each."""
