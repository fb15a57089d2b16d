"""What every other package uses: errors, trial records, metrics and secrets."""
