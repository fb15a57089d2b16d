"""Terminal output: progress, tables, plots and the summary."""
