"""What a person sees: progress, tables, plots and the summary."""
