"""Show a sweep: progress, tables, plots, pages and the summary."""
