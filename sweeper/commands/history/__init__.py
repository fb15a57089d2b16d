"""Track performance over time: keep reference results in a repository, and compare later runs with these results."""
