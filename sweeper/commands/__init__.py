"""What a user starts: a package for each subcommand."""
