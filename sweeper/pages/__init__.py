"""What a sweep shows: progress, tables, plots, pages and the summary."""
